"""Find the loop of a CleanRL script and put the call in its place, with LibCST.

The loops are written down as templates. In a template a name that begins with an underscore is a hole: it stands for a
name, a dotted name or a number of the script, the same one wherever it occurs, and two holes stand for different ones
(but for parameters such as γ and λ). Everything else must be there as it is written; blanks, comments and parentheses
do not count. So a loop that computes anything else is not taken for one that we know.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

try:
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
except ImportError as error:
    raise ImportError("rewriting CleanRL scripts needs LibCST: pip install 'rl-triton[cleanrl]'") from error

MODULE = "rl_triton.adapters.cleanrl"
WIDTH = 127  # CleanRL's


class Refused(Exception):  # noqa: N818 - a result of the command, not a fault
    """The script is left as it is; the message says why."""


class Rewritten(NamedTuple):
    source: bytes
    notes: list[str]
    """What was replaced, and which loops were left alone."""
    encoding: str


@dataclasses.dataclass(frozen=True)
class Template:
    """A loop that we know, with the statements before and behind it that belong to it."""

    function: str
    """What replaces it."""
    statements: str
    loop: int
    """Which of the statements is the loop."""
    call: str
    """The replacement, in the holes' names."""
    rows: tuple[str, ...]
    """Holes whose tensors must have as many rows as the loop has steps."""
    no_other_rows: tuple[str, ...]
    """Holes whose tensors the script must not make with another number of rows: the loop would not read a row more, the
    call refuses it."""
    temporaries: tuple[str, ...]
    """Holes that the replacement no longer assigns."""

    @functools.cached_property
    def parsed(self) -> Sequence[cst.CSTNode]:
        return cst.parse_module(self.statements).body


# What may stand for a tensor of zeros like another; the keyword forms differ between scripts.
ZEROS = (
    "torch.zeros_like(_like).to(_device)",
    "torch.zeros_like(_like, device=_device)",
    "torch.zeros_like(_like)",
)
# What may stand for zero, and for 1 - x.
NUMBERS = {"zero": ("0", "0.0"), "one": ("1", "1.0")}
# Holes that need not differ from others.
PARAMETERS = {"_gamma", "_int_gamma", "_lambda", "_steps", "_device"}

TEMPLATES = (
    Template(
        "compute_gae",
        """\
_advantages = zeros_like(_rewards)
_last = zero
for _t in reversed(range(_steps)):
    if _t == _steps - 1:
        _going_on = one - _next_done
        _successor = _next_value
    else:
        _going_on = one - _dones[_t + 1]
        _successor = _values[_t + 1]
    _delta = _rewards[_t] + _gamma * _successor * _going_on - _values[_t]
    _advantages[_t] = _last = _delta + _gamma * _lambda * _going_on * _last
_returns = _advantages + _values
""",
        2,
        "_advantages, _returns = compute_gae(_rewards, _values, _dones, _next_value, _next_done, _gamma, _lambda)",
        ("_rewards",),
        ("_values", "_dones"),
        ("_last", "_t", "_going_on", "_successor", "_delta"),
    ),
    Template(
        "compute_gae_rnd",
        """\
_ext_advantages = zeros_like(_rewards)
_int_advantages = zeros_like(_int_rewards)
_ext_last = zero
_int_last = zero
for _t in reversed(range(_steps)):
    if _t == _steps - 1:
        _ext_going_on = one - _next_done
        _int_going_on = one
        _ext_successor = _next_ext_value
        _int_successor = _next_int_value
    else:
        _ext_going_on = one - _dones[_t + 1]
        _int_going_on = one
        _ext_successor = _ext_values[_t + 1]
        _int_successor = _int_values[_t + 1]
    _ext_delta = _rewards[_t] + _gamma * _ext_successor * _ext_going_on - _ext_values[_t]
    _int_delta = _int_rewards[_t] + _int_gamma * _int_successor * _int_going_on - _int_values[_t]
    _ext_advantages[_t] = _ext_last = _ext_delta + _gamma * _lambda * _ext_going_on * _ext_last
    _int_advantages[_t] = _int_last = _int_delta + _int_gamma * _lambda * _int_going_on * _int_last
_ext_returns = _ext_advantages + _ext_values
_int_returns = _int_advantages + _int_values
""",
        4,
        "_ext_advantages, _int_advantages, _ext_returns, _int_returns = compute_gae_rnd(_rewards, _int_rewards, "
        "_ext_values, _int_values, _dones, _next_ext_value, _next_int_value, _next_done, _gamma, _int_gamma, _lambda)",
        ("_rewards", "_int_rewards"),
        ("_ext_values", "_int_values", "_dones"),
        (
            "_ext_last", "_int_last", "_t", "_ext_going_on", "_int_going_on", "_ext_successor", "_int_successor",
            "_ext_delta", "_int_delta",
        ),
    ),
    Template(
        "compute_q_lambda",
        """\
_returns = zeros_like(_rewards)
for _t in reversed(range(_steps)):
    if _t == _steps - 1:
        _next_value, _arg = anything
        _going_on = one - _next_done
        _returns[_t] = _rewards[_t] + _gamma * _next_value * _going_on
    else:
        _going_on = one - _dones[_t + 1]
        _next_value = _values[_t + 1]
        _returns[_t] = _rewards[_t] + _gamma * (_lambda * _returns[_t + 1] + (one - _lambda) * _next_value) * _going_on
""",
        1,
        "_next_value, _arg = anything\n"
        "_returns = compute_q_lambda(_rewards, _values, _dones, _next_value, _next_done, _gamma, _lambda)",
        ("_rewards",),
        ("_values", "_dones"),
        ("_t", "_going_on", "_next_value"),
    ),
)  # fmt: skip


class Mismatch(Exception):  # noqa: N818
    def __init__(self, node: cst.CSTNode, wanted: cst.CSTNode) -> None:
        super().__init__()
        self.node, self.wanted = node, wanted


def rewrite(source: bytes) -> Rewritten:
    """The script with every loop that we know replaced, and an import of the functions that it now calls.

    Raises:
        Refused: there is no such loop, or one that is not exactly ours; the message says what differs and where.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(source))
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise Refused(f"not Python that LibCST can read: {error}") from error
    module = wrapper.module
    positions = wrapper.resolve(PositionProvider)

    def line(node: cst.CSTNode) -> int:
        return positions[node].start.line

    imported = _imported_roots(module)
    notes: list[str] = []
    reasons: list[str] = []
    candidates: list[Candidate] = []
    for block, without_graph in _blocks(module):
        body = list(block.body)
        for i, statement in enumerate(body):
            if _is_backward_loop(statement):
                try:
                    found, first, last = _recognise(module, body, i, line)
                    candidates.append(Candidate(block, first, last, body[first : last + 1], found, without_graph))
                except Refused as refusal:
                    reasons.append(str(refusal))
    # What a loop of ours reads it has set itself, so it matters to no other.
    inside = {id(node) for candidate in candidates for replaced in candidate.replaced for node in _walk(replaced)}
    plan: dict[cst.CSTNode, list[Edit]] = {}
    functions: list[str] = []
    for block, first, last, replaced, found, without_graph in candidates:
        loop = replaced[found.template.loop]
        try:
            _check(module, found, line(loop), inside, without_graph, line)
        except Refused as refusal:
            reasons.append(str(refusal))
            continue
        notes.append(f"line {line(loop)}: the loop is now {found.template.function}")
        functions.append(found.template.function)
        statements = _replacement(module, found, replaced[0], positions[replaced[0]].start.column)
        plan.setdefault(block, []).append(Edit(first, last, statements))
    if not plan:
        if "jax" in imported:
            raise Refused("it computes in JAX; rl_triton works on torch tensors")
        if not reasons:
            reasons = ["it has no loop `for t in reversed(range(...))` over the steps of a rollout"]
            if _mentions(module, MODULE):
                reasons = [f"it uses {MODULE} already"]
        raise Refused("; ".join(reasons))
    notes += [f"left alone: {reason}" for reason in reasons]
    module = _with_import(module.visit(_Editor(plan)), list(dict.fromkeys(functions)))
    return Rewritten(module.bytes, notes, module.encoding)


class Candidate(NamedTuple):
    """Statements first to last of a block, which follow a template."""

    block: Any
    first: int
    last: int
    replaced: Sequence[Any]
    found: Found
    without_graph: bool


class Edit(NamedTuple):
    """Statements first to last of a block are replaced."""

    first: int
    last: int
    statements: list[cst.BaseStatement]


class _Editor(cst.CSTTransformer):
    def __init__(self, plan: dict[cst.CSTNode, list[Edit]]) -> None:
        super().__init__()
        self.plan = plan

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated_node = super().on_leave(original_node, updated_node)
        body = None
        for edit in reversed(self.plan.get(original_node, [])):
            body = list(updated_node.body) if body is None else body
            body[edit.first : edit.last + 1] = edit.statements
        return updated_node if body is None else updated_node.with_changes(body=body)


class Found(NamedTuple):
    template: Template
    holes: dict[str, cst.BaseExpression]


def _recognise(module: cst.Module, body: list[Any], loop: int, line: Any) -> tuple[Found, int, int]:
    """The template that the statements around body[loop] follow, and which statements these are."""
    reached, nearest = -1, None
    for template in TEMPLATES:
        wanted = template.parsed
        first = loop - template.loop
        last = first + len(wanted) - 1
        matcher = _Matcher()
        try:
            if first < 0 or last >= len(body):
                raise Mismatch(body[loop], wanted[template.loop])
            # The loop decides which template comes nearest, so it goes first.
            order = [template.loop, *(k for k in range(len(wanted)) if k != template.loop)]
            for k in order:
                matcher.match(wanted[k], body[first + k])
            return Found(template, matcher.holes), first, last
        except Mismatch as mismatch:
            if matcher.matched > reached:
                reached, nearest = matcher.matched, mismatch.node
    node = body[loop] if nearest is None else nearest
    raise Refused(f"line {line(node)}: `{_text(module, node)}` is not what the loops that we know have there")


class _Matcher:
    """Holds a template against a script and collects what its holes stand for."""

    def __init__(self) -> None:
        self.holes: dict[str, cst.BaseExpression] = {}
        self.matched = 0

    def match(self, wanted: Any, node: Any) -> None:
        if isinstance(wanted, cst.Name):
            self._match_name(wanted, node)
        elif isinstance(wanted, cst.Call) and _is_name(wanted.func, "zeros_like"):
            self._match_zeros(wanted, node)
        elif isinstance(wanted, cst.CSTNode):
            if type(wanted) is not type(node):
                raise Mismatch(node, wanted)
            for name in _fields(wanted):
                self._match_field(getattr(wanted, name), getattr(node, name), wanted, node)

    def _match_field(self, wanted: Any, value: Any, wanted_node: cst.CSTNode, node: cst.CSTNode) -> None:
        if isinstance(wanted, Sequence) and not isinstance(wanted, str):
            if len(wanted) != len(value):
                # Statements: say which one is too much or missing, as far as there is one.
                short = min(len(wanted), len(value))
                for w, v in zip(wanted, value, strict=False):
                    self.match(w, v)
                raise Mismatch(value[short] if len(value) > short else node, wanted_node)
            for w, v in zip(wanted, value, strict=True):
                self.match(w, v)
        elif isinstance(wanted, cst.CSTNode):
            if not isinstance(value, cst.CSTNode) or (_is_operator(value) and type(wanted) is not type(value)):
                raise Mismatch(node, wanted_node)
            self.match(wanted, value)
        elif wanted != value:
            raise Mismatch(node, wanted_node)

    def _match_name(self, wanted: cst.Name, node: Any) -> None:
        hole = wanted.value
        if hole in NUMBERS:
            if not (isinstance(node, cst.Integer | cst.Float) and node.value in NUMBERS[hole]):
                raise Mismatch(node, wanted)
        elif hole == "anything":
            self.holes[hole] = node
        elif not hole.startswith("_"):
            if not _is_name(node, hole):
                raise Mismatch(node, wanted)
        elif hole in self.holes:
            if not _same(self.holes[hole], node):
                raise Mismatch(node, wanted)
        else:
            taken = hole not in PARAMETERS and any(
                _same(other, node) for name, other in self.holes.items() if name not in PARAMETERS
            )
            if taken or not _is_plain(node, numbers=hole in PARAMETERS):
                raise Mismatch(node, wanted)
            self.holes[hole] = node
        self.matched += 1

    def _match_zeros(self, wanted: cst.Call, node: Any) -> None:
        like = wanted.args[0].value
        for form in ZEROS:
            trial = _Matcher()
            try:
                trial.match(cst.parse_expression(form), node)
            except Mismatch:
                continue
            self.match(like, trial.holes["_like"])
            return
        raise Mismatch(node, wanted)


def _check(module: cst.Module, found: Found, loop_line: int, inside: set[int], without_graph: bool, line: Any) -> None:
    """What the loop itself does not tell: gradients, how many rows there are, and who else uses its names."""
    function, holes = found.template.function, found.holes
    if not without_graph:
        raise Refused(
            f"line {loop_line}: the loop is not under torch.no_grad(), so what it computes may carry a graph; the "
            "call's results carry none"
        )
    for name in found.template.rows:
        if not _has_rows(module, holes[name], holes["_steps"]):
            raise Refused(
                f"line {loop_line}: the loop runs over `{_text(module, holes['_steps'])}` steps, and nothing in the "
                f"script shows that `{_text(module, holes[name])}` has as many rows"
            )
    for name in found.template.no_other_rows:
        if _has_other_rows(module, holes[name], holes["_steps"]):
            raise Refused(
                f"line {loop_line}: the loop runs over `{_text(module, holes['_steps'])}` steps, and "
                f"`{_text(module, holes[name])}` is made with another number of rows; make it with as many, and leave "
                "the flag or value behind the last one to a variable of its own"
            )
    reads = list(_reads(module))
    for name in found.template.temporaries:
        if not isinstance(holes[name], cst.Name):
            raise Refused(f"line {loop_line}: the loop sets `{_text(module, holes[name])}`, which others may read")
        for node in reads:
            if id(node) not in inside and _same(node, holes[name]):
                raise Refused(f"line {loop_line}: line {line(node)} reads `{node.value}`, which the loop leaves behind")
    if any(_binds(node, function) for node in _walk(module)):
        raise Refused(f"it has something of its own that is called {function}")


def _replacement(module: cst.Module, found: Found, first: Any, column: int) -> list[cst.BaseStatement]:
    """The call's statements, with the comments and blank lines before the first replaced one."""
    statements: list[cst.BaseStatement] = []
    for text in found.template.call.split("\n"):
        filled = _filled(module, found, text)
        if column + len(filled) > WIDTH:
            head, arguments = filled[:-1].split("(", 1)
            filled = f"{head}(\n    {arguments}\n)"
            if column + 4 + len(arguments) > WIDTH:
                each = "".join(f"    {argument},\n" for argument in arguments.split(", "))
                filled = f"{head}(\n{each})"
        statements.append(cst.parse_statement(filled, config=module.config_for_parsing))
    statements[0] = statements[0].with_changes(leading_lines=first.leading_lines)
    return statements


def _filled(module: cst.Module, found: Found, text: str) -> str:
    statement = cst.parse_module(text)

    class Fill(cst.CSTTransformer):
        def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:  # noqa: N802
            return found.holes.get(updated_node.value, updated_node)

    return module.code_for_node(statement.visit(Fill())).strip()


def _with_import(module: cst.Module, functions: list[str]) -> cst.Module:
    """The import goes behind the last of the imports that the script begins with."""
    at = None
    for i, statement in enumerate(module.body):
        if at is not None and isinstance(statement, cst.ClassDef | cst.FunctionDef):
            break
        if _is_import(statement):
            at = i + 1
    if at is None:
        raise Refused("it has no imports at its top, where the new one would go")
    statement = cst.parse_statement(f"from {MODULE} import {', '.join(functions)}", config=module.config_for_parsing)
    return module.with_changes(body=[*module.body[:at], statement, *module.body[at:]])


# Fields that hold blanks, comments, punctuation and parentheses.
_FORM = {
    "lpar", "rpar", "leading_lines", "trailing_whitespace", "header", "footer", "indent", "comma", "semicolon",
    "lbracket", "rbracket",
}  # fmt: skip


def _fields(node: cst.CSTNode) -> Iterator[str]:
    for field in dataclasses.fields(node):
        if field.name not in _FORM and not field.name.startswith("whitespace") and field.name != "equal":
            yield field.name


def _same(a: Any, b: Any) -> bool:
    """Equal but for blanks, comments and parentheses."""
    if isinstance(a, cst.CSTNode):
        return type(a) is type(b) and all(_same(getattr(a, name), getattr(b, name)) for name in _fields(a))
    if isinstance(a, Sequence) and not isinstance(a, str):
        return isinstance(b, Sequence) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _is_name(node: Any, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def _is_operator(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.BaseBinaryOp | cst.BaseUnaryOp | cst.BaseCompOp)


def _is_plain(node: Any, numbers: bool) -> bool:
    """A name or a dotted name (or a number): what can be evaluated once instead of in every step."""
    if isinstance(node, cst.Attribute):
        return _is_plain(node.value, numbers=False)
    return isinstance(node, cst.Name) or (numbers and isinstance(node, cst.Integer | cst.Float))


def _is_backward_loop(statement: Any) -> bool:
    """for ... in reversed(range(...)):"""
    if not (isinstance(statement, cst.For) and isinstance(statement.iter, cst.Call)):
        return False
    call = statement.iter
    if not (_is_name(call.func, "reversed") and len(call.args) == 1):
        return False
    inner = call.args[0].value
    return isinstance(inner, cst.Call) and _is_name(inner.func, "range")


def _is_import(statement: Any) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and any(
        isinstance(small, cst.Import | cst.ImportFrom) for small in statement.body
    )


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _blocks(node: cst.CSTNode, without_graph: bool = False) -> Iterator[tuple[Any, bool]]:
    """Every list of statements, and whether it runs under torch.no_grad() or inference_mode()."""
    if isinstance(node, cst.Module | cst.IndentedBlock):
        yield node, without_graph
    elif isinstance(node, cst.With):
        without_graph |= any(_is_no_grad(item.item) for item in node.items)
    elif isinstance(node, cst.FunctionDef):
        without_graph = any(_is_no_grad(decorator.decorator) for decorator in node.decorators)
    for child in node.children:
        yield from _blocks(child, without_graph)


def _is_no_grad(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and any(
        _same(node.func, cst.parse_expression(f"torch.{name}")) for name in ("no_grad", "inference_mode")
    )


def _reads(module: cst.Module) -> Iterator[cst.Name]:
    """Names that are read where nothing around them binds them: no targets, keywords, attributes or parameters."""

    def visit(node: Any, bound: frozenset[str]) -> Iterator[cst.Name]:
        if isinstance(node, cst.Name):
            if node.value not in bound:
                yield node
        elif isinstance(node, cst.Attribute | cst.Arg):
            yield from visit(node.value, bound)
        elif isinstance(node, cst.Import | cst.ImportFrom | cst.Param):
            return
        elif isinstance(node, cst.FunctionDef | cst.Lambda):
            # A function has its own names; those that it takes from the script may be ours.
            own = {x.name.value for x in _walk(node.params) if isinstance(x, cst.Param)}
            own |= _targets(node, cst.AssignTarget | cst.For)
            yield from visit(node.body, bound | own)
        elif isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.NamedExpr) and isinstance(node.target, cst.Name):
            if isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
                yield from visit(node.value, bound)
        elif isinstance(node, cst.For | cst.CompFor) and isinstance(node.target, cst.Name):
            inner = bound | {node.target.value}
            for child in node.children:
                if child is not node.target:
                    yield from visit(child, bound if child is node.iter else inner)
        elif isinstance(node, cst.BaseComp):
            own = _targets(node, cst.CompFor)
            for child in node.children:
                yield from visit(child, bound | own)
        else:
            for child in node.children:
                yield from visit(child, bound)

    yield from visit(module, frozenset())


def _targets(node: cst.CSTNode, kinds: Any) -> set[str]:
    """The names that statements of these kinds inside a node assign."""
    return {x.target.value for x in _walk(node) if isinstance(x, kinds) and isinstance(x.target, cst.Name)}


def _binds(node: cst.CSTNode, name: str) -> bool:
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        return node.name.value == name
    if isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.For):
        return _is_name(node.target, name)
    if isinstance(node, cst.ImportAlias):
        return _is_name(node.asname.name if node.asname else node.name, name)
    return False


def _has_rows(module: cst.Module, tensor: cst.BaseExpression, steps: cst.BaseExpression) -> bool:
    """Whether every line that assigns the tensor makes it with that many rows: `x = torch.zeros((steps, ...), ...)`."""
    made = list(_assigned(module, tensor))
    return bool(made) and all(any(_same(rows, steps) for rows in map(_rows_of, _walk(value))) for value in made)


def _has_other_rows(module: cst.Module, tensor: cst.BaseExpression, steps: cst.BaseExpression) -> bool:
    """Whether a line that assigns the tensor makes it with a number of rows that is counted from that: `steps + 1`."""
    made = (_rows_of(part) for value in _assigned(module, tensor) for part in _walk(value))
    counted = (
        rows
        for rows in made
        if isinstance(rows, cst.BinaryOperation) and isinstance(rows.operator, (cst.Add, cst.Subtract))
    )
    return any(_same(part, steps) for rows in counted for part in _walk(rows))


def _assigned(module: cst.Module, tensor: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    for node in _walk(module):
        if isinstance(node, cst.Assign) and any(_same(target.target, tensor) for target in node.targets):
            yield node.value


def _rows_of(call: cst.CSTNode) -> cst.BaseExpression | None:
    """Of torch.zeros((steps, ...)), torch.zeros(steps, ...) or torch.zeros((steps, ...) + more), or empty or ones."""
    if not (isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.args):
        return None
    if not (_is_name(call.func.value, "torch") and call.func.attr.value in ("zeros", "empty", "ones")):
        return None
    shape = call.args[0].value
    while isinstance(shape, cst.BinaryOperation) and isinstance(shape.operator, cst.Add) and _holds_tuple(shape):
        shape = shape.left
    return shape.elements[0].value if isinstance(shape, cst.Tuple) and shape.elements else shape


def _holds_tuple(x: cst.BaseExpression) -> bool:
    return isinstance(x, cst.Tuple) or (isinstance(x, cst.BinaryOperation) and _holds_tuple(x.left))


def _imported_roots(module: cst.Module) -> set[str]:
    roots = set()
    for node in _walk(module):
        names: list[Any] = []
        if isinstance(node, cst.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, cst.ImportFrom) and node.module is not None:
            names = [node.module]
        for name in names:
            while isinstance(name, cst.Attribute):
                name = name.value
            roots.add(name.value)
    return roots


def _mentions(module: cst.Module, dotted: str) -> bool:
    wanted = cst.parse_expression(dotted)
    return any(isinstance(node, cst.ImportFrom) and _same(node.module, wanted) for node in _walk(module))


def _text(module: cst.Module, node: cst.CSTNode) -> str:
    """A node's first line, without the lines and comments before it."""
    if hasattr(node, "leading_lines"):
        node = node.with_changes(leading_lines=())
    text = module.code_for_node(node).strip()
    return text.split("\n")[0] + (" ..." if "\n" in text else "")
