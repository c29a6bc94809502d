"""How many positions a request may have: what the network was made for. Samples nothing."""

from dataclasses import replace

from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.plan import Plan
from dlm.inference.request import Request
from dlm.models.lm import LM


def fitting(lm: LM, request: Request, plan: Plan, settings: SamplerConfig, where: str) -> Request:
    """The request if it fits into the model's context; an open-ended one may then write up to its end.

    Raises UserError for one that is too long. `allow_long` lets it pass, except where positions are a learned table.
    """
    limit, learned = lm.config.context_length, lm.config.position_embedding == "learned"
    if settings.allow_long and not learned:
        return request
    given = len(request.ids)
    if plan.open_ended and not request.holes:
        end = limit // plan.length_of_block(None) * plan.length_of_block(None) if plan.aligned and learned else limit
        if end > given:
            return replace(request, gen_length=min(request.gen_length, end - given))
    length = plan.length(request) if learned else given + request.gen_length
    if length <= limit:
        return request
    what = f"{where} has {given} tokens"
    if request.gen_length and not plan.open_ended:
        what += f"; with gen_length = {request.gen_length} that is {length} positions"
    elif plan.open_ended:
        what += " and leaves no room to continue it"
    if learned:
        raise UserError(f"{what}, and model {lm.name!r} has learned only {limit}: make it shorter")
    raise UserError(
        f"{what}, and model {lm.name!r} was made for {limit} positions: make it shorter, or let it run on beyond what "
        "the model was trained for with --allow-long (allow_long=True)"
    )
