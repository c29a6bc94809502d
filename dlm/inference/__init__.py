"""The engine's room: requests in, generations out. The reference sampler here defines what every faster one must give."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "config": ["EngineConfig", "SamplerConfig"],
        "engine": ["Engine", "Full"],
        "events": ["Event", "Times"],
        "generation": ["generate", "infill"],
        "prompts": ["parse_holes"],
        "reference": ["sample"],
        "request": ["Generation", "Interrupted", "Request", "StepEvent"],
    },
)
