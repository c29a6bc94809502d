"""Renders Jinja templates under limits: they come with checkpoints, so anyone may have written them."""

import json
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dlm.data.budget import Budget

RANGE = 100_000
MOST_NODES = 8_000
"""Nodes of a parsed template: the time to compile it grows with them. The largest published templates have 1,400."""
TYPES = (
    *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence"),
    *("number", "true", "false", "boolean", "callable"),
)
"""Tests that look at a value's type only."""
LEFT_OUT = ("pprint", "random", "urlize", "wordwrap")
"""Filters that are left out: they are slow or random, and no chat template uses them."""
FAILURES = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(RuntimeError, SyntaxError, MemoryError, AssertionError),
)
"""Exceptions that a template may raise: all of them are its own mistakes."""
_BUDGET: ContextVar[Budget] = ContextVar("budget")


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template with these variables. Raises one of `FAILURES`, also when a limit is reached."""
    token = _BUDGET.set(Budget(dict(variables)))
    try:
        return _compiled(template).render(**variables)
    finally:
        _BUDGET.reset(token)


class Limited(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which keeps templates from Python's internals, with a budget for their work."""

    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if sum(1 for _ in tree.find_all(nodes.Node)) > MOST_NODES:
            raise TemplateError(f"it has more than {MOST_NODES:,} parts")
        tree = Accounts().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BUDGET.get().operator(operator, left, right)
        return _BUDGET.get().add(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            budget.method(owner, getattr(method, "__name__", ""), [*args, *kwargs.values()])
        return budget.add(super().call(__context, __obj, *args, **kwargs))


class Accounts(NodeTransformer):
    """Inserts calls that count the work into a parsed template: of each pass of a loop, and of the size of each new
    value."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        found = self._body(node)
        if node.test is not None:
            node.test = nodes.And(_through("tick", nodes.Const(0), node), node.test, lineno=node.lineno)
        return found

    def _body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        texts = [part for child in node.body for part in (child, *child.find_all(nodes.TemplateData))]
        size = sum(len(text.data) for text in texts if isinstance(text, nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_through("tick", nodes.Const(size), node), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through("show", part, node) for part in node.nodes]
        return node

    def _new(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _through("add", node, node)

    visit_List = visit_Tuple = visit_Dict = _new

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("add", node, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("read", node.expr, node)
        for operand in node.ops:
            operand.expr = _through("read", operand.expr, node)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.name not in TYPES:
            node.node = _through("read", node.node, node)
        return node


def _through(account: str, value: nodes.Expr, at: nodes.Node) -> nodes.Expr:
    """An expression handed through one of `ACCOUNTS`, under a name that no template can spell."""
    return nodes.Filter(value, f"{account}!", [], [], None, None, lineno=at.lineno)


def _tick(text: int) -> bool:
    """Counts one more pass of a loop, or call of a macro, whose body holds so much text."""
    budget = _BUDGET.get()
    budget.step()
    budget.make(text)
    return True


ACCOUNTS: dict[str, Callable[[Any], Any]] = {
    "tick!": _tick,
    "read!": lambda value: _BUDGET.get().read(value),
    "show!": lambda value: _BUDGET.get().show(value),
    "add!": lambda value: _BUDGET.get().add(value),
}


def _accounted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its work counted; the attribute that tells Jinja what to pass it first is copied."""
    first = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        if len(args) > first:
            budget.filter(name, args[first], [*args[first + 1 :], *kwargs.values()])
        return budget.add(function(*args, **kwargs))

    return run


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Counts what `{{ … }}` shows. It takes the context so that Jinja does not evaluate it at compile time."""
    return _BUDGET.get().show(value)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _range(*args: int) -> range:
    if len(found := range(*args)) > RANGE:
        raise SecurityError(f"a range has more than {RANGE:,} numbers")
    return found


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    environment = Limited(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        optimized=False,  # or constants would be computed while it compiles
        finalize=_finalize,
    )
    known = {**environment.filters, "tojson": _tojson}
    accounted = {name: _accounted(name, function) for name, function in known.items() if name not in LEFT_OUT}
    environment.filters = accounted | ACCOUNTS
    environment.globals |= {"raise_exception": _raise, "range": _range}
    del environment.globals["lipsum"]
    # transformers marks answers with a tag of its own; we find them by prefixes, so the tag only has to do nothing.
    plain = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", template)
    return environment.from_string(re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", plain))
