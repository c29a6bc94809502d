"""Which settings a decode reads, and what other programs call them. To restrict a setting: a line here."""

from dlm.diffusion.unmask import RULES
from dlm.reading import Reader

READ_BY = {
    name: [rule for rule, known in RULES.items() if name in known.settings()]
    for rule in RULES.values()
    for name in rule.settings()
}
"""The rules that read each rule setting."""

HOLES = ("gen_length", "max_gen_length", "stop")
"""Settings that say how a continuation ends; a hole ends where its length says."""

FILLS = ("check", "attempts", "retry_temperature")
"""Settings that only holes read."""

SAMPLER_READERS = {
    **{
        name: Reader(
            decides="rule",
            where=f"by the rule{'s' * (len(rules) > 1)} {', '.join(rules)}",
            reads=lambda s, rules=rules: s.rule in rules,
        )
        for name, rules in READ_BY.items()
    },
    **{
        name: Reader(decides="strategy", where='by strategy = "multi_block"', reads=lambda s: s.strategy != "block")
        for name in ("max_active_blocks", "block_add")
    },
    **{
        name: Reader(decides="temperature", where="with a temperature above 0", reads=lambda s: s.temperature > 0)
        for name in ("top_k", "top_p")
    },
    "num_samples": Reader(
        decides="temperature",
        where='with a temperature above 0, rule = "random" or a solver (else all samples are the same)',
        reads=lambda s: s.temperature > 0 or s.decode_rule.score == "order" or s.solver or s.num_samples == 1,
    ),
    "max_post_edit_steps": Reader(
        decides="edit_threshold", where="with edit_threshold", reads=lambda s: s.edit_threshold is not None
    ),
    "max_gen_length": Reader(
        decides="gen_length", where='with gen_length = "auto"', reads=lambda s: s.gen_length == "auto"
    ),
}
"""What reads the settings of [sampler] that not every decode reads.

block_length and steps are not among them: they are the schedule, which every rule is handed, though some go by what they
see and causal families by the token. Nor is a value that only says "no": top_k = none.
"""

ENGINE_ALONE = ("memory_fraction", "max_waiting")
"""Settings of an engine that waits for requests; where all are there from the start it is as large as they need."""

ENGINE_READERS = {
    "refresh_interval": Reader(
        decides="cache", where='by cache = "prefix" and "dual"', reads=lambda e: e.cache in ("prefix", "dual")
    ),
    "cache_delay": Reader(
        decides="cache",
        where='by cache = "prefix" and "dual", with refresh_interval',
        reads=lambda e: e.cache in ("prefix", "dual") and e.refresh_interval is not None,
    ),
}
"""What reads the settings of [engine] that not every engine reads, once `cache = "auto"` is settled."""

ALIASES = {
    **dict.fromkeys(("max_new_tokens", "max_tokens", "gen_len", "num_tokens"), '"gen_length"'),
    "max_length": '"gen_length", without the prompt',
    **dict.fromkeys(("num_steps", "diffusion_steps", "denoising_steps", "num_inference_steps"), '"steps"'),
    **dict.fromkeys(("block_size", "block_len"), '"block_length"'),
    **dict.fromkeys(("n", "num_return_sequences"), '"num_samples"'),
    "do_sample": '"temperature": above 0 it samples, at 0 it does not',
    **dict.fromkeys(("alg", "algorithm", "remasking_strategy"), '"rule"'),
    "alg_temp": 'no setting: a temperature of the order of positions is none of the rules (see "rule")',
    **dict.fromkeys(("cfg", "guidance_scale"), '"cfg_scale"'),
    **dict.fromkeys(("confidence_threshold", "conf_threshold"), '"threshold"'),
    **dict.fromkeys(("stop_strings", "stop_sequences"), '"stop"'),
    **dict.fromkeys(("use_cache", "dual_cache"), '"cache", of the engine'),
    "random_seed": '"seed"',
}
"""What other programs call our settings, for those who paste a call."""
