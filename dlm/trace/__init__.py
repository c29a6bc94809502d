"""Traces: every denoising step of a request, stored safely and replayed exactly. Needs no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "assemble": ["from_events", "from_map", "from_states"],
        "codec": ["CorruptTrace", "decode", "encode"],
        "config": ["TraceConfig"],
        "compare": ["Diff", "diff"],
        "events": ["ACCEPT", "MASK", "REJECT", "REPLACE", "SET", "Event"],
        "pieces": ["Pieces"],
        "reader": ["UnknownTrace"],
        "record": ["BatchRecorder", "Recorder"],
        "store": ["TraceStore"],
        "trace": ["Trace"],
        "view": ["page"],
        "writer": ["DuplicateTrace"],
    },
)
