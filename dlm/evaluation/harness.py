"""A model for lm-eval, EleutherAI's harness: `HarnessLM`. Its tasks, prompts and metrics are lm-eval's own.

    lm_eval.simple_evaluate(model=dlm.evaluation.HarnessLM(lm, steps=64), tasks=["gsm8k"])
    python -m dlm.evaluation.harness run --model dlm --model_args lm=pico,steps=64 --tasks gsm8k

The second is lm-eval's own command line, with the model `dlm` known to it.
"""

from typing import TYPE_CHECKING, Any

import torch

from dlm.errors import UserError
from dlm.evaluation.likelihood import is_greedy, likelihoods
from dlm.evaluation.score import encode_text, span_of
from dlm.evaluation.tally import Tally
from dlm.inference.generation import engine_for
from dlm.inference.keywords import settings_of
from dlm.models.fingerprint import weights_digest
from dlm.models.lm import LM
from dlm.models.loading import load

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from dlm.evaluation.until import WHERE, Until
except ImportError as error:
    raise UserError(f"HarnessLM needs lm-eval: pip install 'dlm[eval]' ({error})") from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


class HarnessLM(TemplateLM):
    """A loaded model as lm-eval sees one.

    lm: A model, or what `dlm.load` takes: a bundled name, a folder, a hub id. From the command line also `pretrained`.
    draws: Draws of the likelihood bound, for answers too long to enumerate (`dlm.score`).
    early: End the draws of a question once its best answer is decided.
    batch_size: Requests that are decoded at a time. It changes no result.
    Further settings are those of `dlm.generate`; a task's `temperature`, `top_k`, `top_p` and length go before them.

    After a run `tally.records` holds the error and the draws of each likelihood, and the forwards and the end of each
    generation; `get_model_info`, which lm-eval puts into its results, sums them up.
    """

    def __init__(
        self,
        lm: LM | str | None = None,
        *,
        pretrained: str | None = None,
        draws: int = 128,
        early: bool = True,
        seed: int = 0,
        batch_size: int | str = 64,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        super().__init__()
        name = lm if pretrained is None else pretrained
        if name is None or (lm is not None and pretrained is not None):
            raise UserError("HarnessLM(): give one model, as lm=NAME or pretrained=NAME")
        if not isinstance(draws, int) or draws < 2:
            raise UserError(f"HarnessLM(): draws = {draws!r} must be at least 2: one draw has no standard error")
        self.settings = {"seed": seed, **settings}
        _, self.engine_config = settings_of(WHERE, self.settings)  # a mistake is said before anything is loaded
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # lm-eval's command line says cuda:0 where nobody said anything
        self.lm = load(name, device=device or "auto", dtype=dtype) if isinstance(name, str) else name
        self._device = self.lm.device
        self.draws, self.early, self.seed = draws, bool(early), seed
        self.batch_size = (
            max_batch_size or 64 if isinstance(batch_size, str) and "auto" in batch_size else int(batch_size)
        )
        self.tally = Tally()

    # What lm-eval asks of a tokenizer.

    @property
    def eot_token_id(self) -> int:
        if self.lm.eos_id is None:
            raise UserError(
                f"model {self.lm.name!r} names no end-of-text, which lm-eval puts before a text without context"
            )
        return self.lm.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the tokenizer's beginning-of-text where it names one, as in `hf`."""
        named = self.lm.require_tokenizer().settings.get("bos_token")
        named = named.get("content") if isinstance(named, dict) else named
        token = self.lm.require_tokenizer().special_id(named) if isinstance(named, str) else None
        return self.eot_token_id if token is None else token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return encode_text(self.lm, string)

    @property
    def max_length(self) -> int:
        """Tokens that the model was made for."""
        return self.lm.config.context_length

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.lm.require_tokenizer().apply_chat_template(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.lm.require_tokenizer().chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """The name in lm-eval's caches; it has the weights' digest, for the model's name may stand for others later."""
        return f"{self.lm.name}-{self.fingerprint}".replace("/", "__")

    # Likelihoods.

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        spans = [self._span(context, answer) for _, context, answer in requests]
        found = likelihoods(self.lm, spans, draws=self.draws, seed=self.seed, early=self.early)
        self.tally.scored([context for (context, _), *_ in requests], found)
        answers = [(-one.nats, is_greedy(self.lm, span)) for one, span in zip(found, spans, strict=True)]
        for (request, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request, answer)
        return answers

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        windows = [self._windows(request.args[0]) for request in requests]
        flat = [self._span(list(context), list(answer)) for own in windows for context, answer in own]
        found = iter(likelihoods(self.lm, flat, draws=self.draws, seed=self.seed))
        totals = []
        for own, request in zip(windows, requests, strict=True):
            total = self.tally.rolled([next(found) for _ in own])
            totals.append(-total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, -total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """lm-eval's windows: each token is scored once, after as much as fits of what stands before it."""
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def _span(self, context: list[int], answer: list[int]) -> Any:
        """An answer in its context, which loses its beginning where both are too long, as in lm-eval's `hf`."""
        longest = self.max_length
        if self.lm.network.attention.kind == "causal":
            return self._causal_span(context, answer, longest)
        if len(context) + len(answer) > longest:
            self.tally.truncated += 1
            context = context[len(context) + len(answer) - longest :]
        return span_of(self.lm, context, answer[-longest:], "request")

    def _causal_span(self, context: list[int], answer: list[int], longest: int) -> Any:
        """A causal model reads all but the last token, so one more fits."""
        if (over := len(context) + len(answer) - longest - 1) <= 0:
            return span_of(self.lm, context, answer, "request", room=1)
        self.tally.truncated += 1
        return span_of(self.lm, context[over:], answer[-longest:], "request", room=1)

    # Generation.

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        if not requests:
            return []
        arguments: list[Any] = [request.args for request in requests]  # (context, generation_kwargs)
        asked = [Until.of(self.lm, self.settings, task) for _, task in arguments]
        work = [
            until.decoding(self.lm, self._prompt(context, until), number)
            for number, ((context, _), until) in enumerate(zip(arguments, asked, strict=True))
        ]
        engine = engine_for(self.lm, work, self.engine_config, self.batch_size)
        texts = []
        for request, until, result in zip(requests, asked, engine.run(work), strict=True):
            text, ended = until.cut(self.lm, result)
            self.tally.written(min(until.most, len(result.tokens)), result.nfe, ended)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _prompt(self, context: str, until: Until) -> list[int]:
        """A context's ids; it loses its beginning where it leaves no room for the answer."""
        ids, room = self.tok_encode(context) or [self.prefix_token_id], until.room(self.max_length)
        self.tally.truncated += len(ids) > room
        return ids[-room:]

    # What lands in lm-eval's results.

    @property
    def fingerprint(self) -> str:
        """Of the weights."""
        return weights_digest(self.lm.network)

    def get_model_info(self) -> dict[str, Any]:
        """Settings, and what the run came to so far."""
        settings = {name: value for name, value in self.settings.items() if isinstance(value, (str, int, float, bool))}
        return {
            "model_name": self.lm.name,
            "model_family": self.lm.config.model_type,
            "model_fingerprint": self.fingerprint,
            "decoding": {**settings, "cache": self.engine_config.cache},
            "likelihood_draws": self.draws,
            "likelihood_ends_early": self.early,
            **self.tally.summary(),
        }


if "dlm" not in model_registry:
    register_model("dlm")(HarnessLM)


def main() -> None:
    """lm-eval's own command line, which then knows `--model dlm`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    # By its real name: what is run as a script is another module, and its class another one.
    from dlm.evaluation import harness

    harness.main()
