"""The messages that users of the packages can get, read from the sources, and the entries that explain them.

`python tools/messages.py` lists messages without an entry in docs/troubleshooting, and entries without a message.
`python tools/messages.py PACKAGE` lists all messages of one package with the place that each comes from.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "troubleshooting"
PACKAGES = ("layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")
FIELD = "…"
# What a user never sees: invariants, control flow, and what the tests of the packages raise for their own authors.
NOT_FOR_USERS = {"AssertionError", "KeyboardInterrupt", "SystemExit", "StopIteration", "GeneratorExit"}
LOGGED = {"warn", "warning", "error", "exception", "critical", "_report"}
# A message of fewer words than these in its fixed text is what another piece of code says, with a name before it.
WEAK = 2
# What stands inside other messages and says nothing alone.
FRAGMENTS = {"starting the process group", "the default stream", "the host", "rank … of replica …"}
FRAGMENTS |= {"dtype …, full dtype …, …", "on rank …", "(no stack: the process did not answer)"}
# Tables whose texts are documentation.
TABLES = {"_ops/table.py"}
_PRINTF = re.compile(r"%(?:\.\d+)?[a-z]")


@dataclass(frozen=True)
class Message:
    """One message: its text with `…` where values are put in, and where it is made."""

    text: str
    path: Path
    line: int

    @property
    def place(self) -> str:
        """File and line, from the root."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def page(self) -> str:
        """The page that explains it: the package's, or that of the training job."""
        package = self.path.relative_to(ROOT / "packages").parts[0]
        return "fsdp-train" if "train" in self.path.parts else package


@dataclass
class Module:
    """A parsed source file, with the parent of each node and what is assigned in each function."""

    path: Path
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = list(ast.walk(self.tree))
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self._writes: dict[ast.AST, list[ast.AST]] = {}

    def scope(self, node: ast.AST) -> ast.AST:
        """The innermost function around a node, else the module."""
        while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            node = self.parents[node]
        return node

    def writes(self, scope: ast.AST) -> list[ast.AST]:
        """Assignments, loops and calls in a function; of the module, those outside functions."""
        if scope not in self._writes:
            inside = ast.walk(scope) if scope is not self.tree else iter(self.tree.body)
            kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.Call)
            found: list[ast.AST] = [node for node in inside if isinstance(node, kinds)]
            if scope is self.tree:  # tables of words, not of objects with words of their own
                found = [node for node in found if not any(isinstance(n, ast.Call) for n in ast.walk(node))]
            self._writes[scope] = found
        return self._writes[scope]


class Package:
    """All modules of one package, and the functions in them by name."""

    def __init__(self, name: str) -> None:
        """Parse the sources of ``name``."""
        folder = ROOT / "packages" / name / "src"
        self.modules = [
            Module(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(folder.rglob("*.py"))
        ]
        self.functions: dict[str, list[tuple[Module, ast.FunctionDef]]] = {}
        self.calls: dict[str, list[tuple[Module, ast.Call]]] = {}
        self.keeping: list[tuple[Module, ast.Assign | ast.ClassDef]] = []
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, ast.FunctionDef):
                    self.functions.setdefault(node.name, []).append((module, node))
                elif isinstance(node, ast.Call):
                    self.calls.setdefault(called(node), []).append((module, node))
                elif isinstance(node, (ast.Assign, ast.ClassDef)):
                    self.keeping.append((module, node))

    def messages(self) -> list[Message]:
        """Every message once, in the order of the files."""
        found: dict[str, Message] = {}
        for module in self.modules:
            for node in module.nodes:
                for expression in roots(node):
                    for text, where, line in Reader(self, module).read(expression):
                        if text not in FRAGMENTS:
                            found.setdefault(text, Message(text, where.path, line))
        return list(found.values())


class Reader:
    """Follows one expression to the texts that it can be."""

    def __init__(self, package: Package, module: Module, hops: int = 4) -> None:
        """Read in ``module`` of ``package``; go through at most ``hops`` names and calls."""
        self.package = package
        self.module = module
        self._hops = hops
        self._seen: dict[object, int] = {}

    def read(self, expression: ast.expr) -> Iterator[tuple[str, Module, int]]:
        """The texts of a message, and where each stands; those of its fields where it says nothing itself."""
        if self._been_at(expression) or any(self.module.path.match(table) for table in TABLES):
            return
        if isinstance(expression, (ast.IfExp, ast.BoolOp)):
            branches = (
                expression.values
                if isinstance(expression, ast.BoolOp)
                else [expression.body, expression.orelse]
            )
            for branch in branches:
                yield from self.read(branch) if templates(branch) else self._follow(branch)
            return
        texts = templates(expression)
        if any(words(text) >= WEAK for text in texts):
            for text in texts:
                if words(text) >= WEAK and " " in text:
                    yield clean(text), self.module, expression.lineno
            return
        said = False
        for found in self._follow(expression):
            said = True
            yield found
        for text in texts:
            if not said and words(text) and " " in text:
                yield clean(text), self.module, expression.lineno

    def _follow(self, node: ast.AST) -> Iterator[tuple[str, Module, int]]:
        if self._hops == 0:
            return
        if isinstance(node, ast.Name):
            yield from self._assigned(node)
        elif isinstance(node, ast.Attribute):
            yield from self._kept(node.attr)
        elif isinstance(node, ast.Call):
            for module, function in self.package.functions.get(called(node), ()):
                yield from self._returned(module, function)
            table = [name for name in ast.walk(node.func) if isinstance(name, ast.Name) and name.id.isupper()]
            for value in (*table, *node.args, *(keyword.value for keyword in node.keywords)):
                yield from self._strong(value)
        else:
            for child in ast.iter_child_nodes(node):
                yield from self._strong(child)

    def _strong(self, node: ast.AST) -> Iterator[tuple[str, Module, int]]:
        """What a value inside a message says, if it is a sentence of its own."""
        texts = templates(node) if isinstance(node, ast.expr) else []
        if any(words(text) >= WEAK for text in texts):
            assert isinstance(node, ast.expr)
            yield from self.read(node)
        else:
            yield from self._follow(node)

    def _returned(self, module: Module, function: ast.FunctionDef) -> Iterator[tuple[str, Module, int]]:
        if self._been_at(function):
            return
        reader = self._in(module)
        for node in ast.walk(function):
            if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
                yield from reader._strong(node.value)

    def _assigned(self, name: ast.Name) -> Iterator[tuple[str, Module, int]]:
        """What is assigned or appended to a name in its function or module, or passed for it by callers."""
        for scope in (self.module.scope(name), self.module.tree):
            yield from self._assigned_in(scope, name)

    def _assigned_in(self, scope: ast.AST, name: ast.Name) -> Iterator[tuple[str, Module, int]]:
        if self._been_at((scope, name.id)):
            return
        for node in self.module.writes(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
                targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = node.iter if isinstance(node, ast.For) else node.value
                if value is not None and any(name.id in names(target) for target in targets):
                    yield from self._in(self.module)._strong(value)
            elif isinstance(node, ast.Call) and added_to(node) == name.id:
                yield from self._in(self.module)._strong(node.args[0])
        if isinstance(scope, ast.FunctionDef):
            yield from self._passed(scope, name.id)

    def _passed(self, function: ast.FunctionDef, parameter: str) -> Iterator[tuple[str, Module, int]]:
        listed = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        every = {*listed, *(argument.arg for argument in function.args.kwonlyargs)}
        if parameter not in every:
            return
        method = bool(listed) and listed[0] in ("self", "cls")
        for module, call in self.package.calls.get(function.name, ()):
            given = [keyword.value for keyword in call.keywords if keyword.arg == parameter]
            if parameter in listed:
                given += call.args[listed.index(parameter) - method :][:1]
            for value in given:
                yield from self._in(module)._strong(value)

    def _kept(self, attribute: str) -> Iterator[tuple[str, Module, int]]:
        """What any object of the package keeps under a name."""
        if self._been_at(attribute):
            return
        for module, node in self.package.keeping:
            if isinstance(node, ast.Assign):
                targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
                if any(target.attr == attribute for target in targets):
                    yield from self._in(module)._strong(node.value)
            else:
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                listed = [each.id for each in fields if isinstance(each, ast.Name)]
                if attribute in listed:
                    yield from self._built(node.name, attribute, listed.index(attribute))
        yield from self._built("replace", attribute, None)

    def _built(self, kind: str, name: str, index: int | None) -> Iterator[tuple[str, Module, int]]:
        """What a field of a dataclass is given where one is made."""
        for module, call in self.package.calls.get(kind, ()):
            given = [keyword.value for keyword in call.keywords if keyword.arg == name]
            for value in given or ([] if index is None else call.args[index : index + 1]):
                yield from self._in(module)._strong(value)

    def _been_at(self, place: object) -> bool:
        """Whether this was read before with as far to go."""
        before, self._seen[place] = self._seen.get(place, -1), self._hops
        return before >= self._hops

    def _in(self, module: Module) -> "Reader":
        reader = Reader(self.package, module, self._hops - 1)
        reader._seen = self._seen
        return reader


def roots(node: ast.AST) -> Iterator[ast.expr]:
    """What a node says to a user: an exception's arguments, a warning's text, a warning of a logger."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        if called(node.exc) not in NOT_FOR_USERS:
            yield from node.exc.args
    elif isinstance(node, ast.Call):
        name = called(node)
        if name.endswith("Error") and name not in NOT_FOR_USERS:
            yield from node.args
        elif name in LOGGED and isinstance(node.func, ast.Attribute):
            yield from node.args[:1]


def called(node: ast.Call) -> str:
    """The last name of what a call calls."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def added_to(node: ast.Call) -> str | None:
    """The name of the list that a call appends to or extends."""
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in ("append", "extend") and node.args:
        return function.value.id if isinstance(function.value, ast.Name) else None
    return None


def names(target: ast.expr) -> set[str]:
    """The names in a target of an assignment."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def templates(node: ast.expr) -> list[str]:
    """The texts that an expression can be, with `…` for each value; none if it is no text."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        pieces = (str(part.value) if isinstance(part, ast.Constant) else FIELD for part in node.values)
        return ["".join(pieces)]
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in templates(value)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = templates(node.left), templates(node.right)
        if not left and not right:
            return []
        return [one + other for one in left or [FIELD] for other in right or [FIELD]]
    return []


def words(text: str) -> int:
    """The number of words in the fixed text."""
    return len(re.findall(r"[A-Za-z]+", text))


def clean(text: str) -> str:
    """A text on one line, with one `…` for values that stand together."""
    text = _PRINTF.sub(FIELD, text)
    text = " ".join(text.split())
    return re.sub(f"{FIELD}(?: ?{FIELD})+", FIELD, text)


def entries(page: Path) -> list[str]:
    """The messages that a page explains: each is a heading in code quotes, above its explanation."""
    lines = page.read_text(encoding="utf-8").splitlines()
    terms = (re.fullmatch(r"#### (`+) ?(.+?) ?\1", line) for line in lines)
    return [term[2] for term in terms if term]


def missing_and_stale() -> tuple[list[Message], list[tuple[str, str]]]:
    """Messages without an entry on their page, and entries (page, text) whose message no source has."""
    made = {
        (message.page, message.text): message for name in PACKAGES for message in Package(name).messages()
    }
    pages = (page for page in sorted(PAGES.glob("*.md")) if page.stem != "index")
    explained = [(page.stem, text) for page in pages for text in entries(page)]
    missing = [message for key, message in made.items() if key not in explained]
    return missing, [key for key in explained if key not in made]


def report(missing: list[Message], stale: list[tuple[str, str]]) -> str:
    """What to write and what to remove, in words."""
    lines = [f"docs/troubleshooting/{m.page}.md lacks `{m.text}` (from {m.place})" for m in missing]
    lines += [
        f"docs/troubleshooting/{page}.md explains what no source says: `{text}`" for page, text in stale
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print messages of the packages named, or what the pages lack."""
    for name in arguments:
        for message in Package(name).messages():
            print(f"{message.place}: {message.text}")
    if arguments:
        return 0
    missing, stale = missing_and_stale()
    print(report(missing, stale) or "every message has its entry")
    return 1 if missing or stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
