"""check_heads: refuses plans after which an attention's code would take a rank's features apart in a wrong way."""

import ast
import contextlib
import functools
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

from tkernels.layers.marks import is_split

HEADS = r"\w*heads?"  # names of attributes that count heads
_SIZE = r"(^|_)(d|dim|size|width|channels|features)(_|$)|per_(\w+_)?head"  # but for those that say how large one is
_GATHER = "give what it splits 'colwise_gather_output' and the projection behind it 'rowwise_split_input'"
_FUNCTIONS = "torch", "F", "functional", "nn.functional", "einops", "self"  # modules, whose names stand before one
VIEWS = frozenset({"view", "reshape", "unflatten", "rearrange"})  # what takes features apart


def text_config(model: nn.Module):
    """model.config, where a model of transformers has one, that of its language model."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_heads(
    model: nn.Module, split: list[str], ranks: int, strided: frozenset[str] = frozenset(),
    of_heads: Collection[str] = (),
):  # fmt: skip
    """Raises ValueError for an attention whose heads would not be whole on every rank, by the numbers in model.config,
    for one whose forward counts on all heads, or that has a parameter for each of them, and for stacked projections of
    which a rank would get other parts than the model takes them for.

    split: names of the layers of which each rank has some of the features, and returns these. strided: those of them
        of which it has some of each of several blocks. of_heads: of the parameters of which it gets its heads' part.
    """
    # A layer of PEFT's wraps another.
    split = list(dict.fromkeys(re.sub(r"\.(base_layer|lora_[AB]\.[^.]*)$", "", name) for name in split))
    config, stacked = text_config(model), {"c_attn": "queries, keys and values"}
    if hasattr(config, "model_type"):  # of transformers, whose models take whole parts of the output
        stacked["Wqkv"] = stacked["c_attn"]
        stacked |= dict.fromkeys(("gate_up_proj", "Wi", "input_linear"), "gate and up-projection")
    for name in split:
        path, _, own = name.rpartition(".")
        what = stacked.get(own)
        if what is None and ranks > 1 and _takes_apart(model.get_submodule(path), own):
            what = "several projections"
        if what is not None and name not in strided:
            raise ValueError(
                f"parallelize: {name!r} is {what} in one, which are taken apart by their whole sizes; give it "
                f"'colwise_gather_output' and the projection behind it 'rowwise_split_input' (in Megatron's vocabulary "
                f"gather_output=True and input_is_parallel=False, or partition_stride, the number of projections)"
            )
    heads = _numbers(config, "num_attention_heads")
    groups = _numbers(config, "num_key_value_heads") or heads
    attentions = [name for name in split if "att" in name.lower()]
    if attentions and any(number % ranks for number in heads + groups):
        raise ValueError(
            f"parallelize: {attentions[0]!r} can't be split by heads: {' or '.join(map(str, heads))} heads and "
            f"{' or '.join(map(str, groups))} of keys and values (in model.config) don't divide by {ranks} ranks; use "
            f"a number of ranks that divides both, or leave the attention out of the plan"
        )
    if ranks == 1:
        return
    for path in dict.fromkeys(name.rpartition(".")[0] for name in split):
        module = model.get_submodule(path)
        named = {name: size for name, size in vars(module).items() if "head" in name and type(size) is int}
        counts = {size for name, size in named.items() if re.fullmatch(HEADS, name)}
        counts |= {*heads, *groups} if any(name.rpartition(".")[0] == path for name in attentions) else set()
        counts.discard(1)
        widths = {size for name, size in named.items() if not re.fullmatch(HEADS, name)}
        for name, parameter in module.named_parameters(recurse=False):
            sizes = parameter.shape[:-1] if parameter.shape[-1:] and parameter.shape[-1] in widths else parameter.shape
            number = next((size for size in sizes if size in counts), None)
            if number and not is_split(parameter) and f"{path}.{name}" not in of_heads:
                raise ValueError(
                    f"parallelize: {path!r}, {type(module).__name__}, has {name} of {tuple(parameter.shape)}, which "
                    f"goes with all {number} heads, of which a rank would have {number // ranks}; {_GATHER}"
                )
    if getattr(config, "base_model_tp_plan", None):  # a model with a plan of its own counts on it
        return
    siblings = {}
    for name in split:
        siblings.setdefault(name.rpartition(".")[0], []).append(name)
    for path, names in siblings.items():
        module, by_config = model.get_submodule(path), not set(names).isdisjoint(attentions)
        features = [getattr(model.get_submodule(name), "out_features", 0) for name in names]
        sizes = _sizes_of_a_head(module)
        own = {each.rpartition(".")[2] for each in names}
        by_name = _heads_in_views(type(module))
        counts = {name for child, name in _counted(type(module)) if child in own}  # in so many parts, of any size
        if "att" in f"{path}{type(module).__name__}".lower():
            counts |= {name for name in by_name if _counts_heads(name)}
        for name in dict.fromkeys((*by_name, *counts)):
            number, keys = _value(module, name), "key" in name or "kv" in name
            if type(number) is not int:
                continue
            every, known = (min(features), groups) if keys else (max(features), heads)
            told = sizes or by_config and known  # of a rank's heads from all
            if number == every:
                what = "all features"
            elif not _counts_heads(name) and name not in counts:
                continue
            elif every in [number * size for size in sizes] or by_config and number in known:
                what = "all heads"
            elif name in counts and not told and number > 1:
                what = "perhaps all heads"
            else:
                continue
            others = [each for child, each in module.named_parameters() if child.split(".")[0] not in own]
            per_head = what == "all heads" and any(number in each.shape for each in others)  # as T5's relative biases
            too = "" if told else ", and head_dim to the features of one head, by which it is told from all of them"
            set_it = "" if per_head else f"set {name} to that on each such module before{too}, or "
            raise ValueError(
                f"parallelize: the forward of {path!r}, {type(module).__name__}, takes its features apart by "
                f"{name}={number}, {what}, of which a rank would have {number // ranks}; {set_it}{_GATHER}"
            )


def _counts_heads(name: str) -> bool:
    name = name.rpartition(".")[2]
    return re.fullmatch(HEADS, name) is not None and not re.search(_SIZE, name)


def _sizes_of_a_head(module: nn.Module) -> list[int]:
    """What attributes and properties of a module, by their names, say of the features of one head."""
    found = []
    for name in dir(module):
        if "head" in name and not _counts_heads(name):
            with contextlib.suppress(Exception):  # whatever a property may raise
                found.append(getattr(module, name))
    return [size for size in found if type(size) is int]


def _value(module: nn.Module, name: str):
    """Of an attribute, or of one of an attribute, as config.n_head; None if there is none."""
    return functools.reduce(lambda value, each: getattr(value, each, None), name.split("."), module)


def _numbers(config, name: str) -> list[int]:
    """The numbers of this name in the config of a model, or of its layers where these differ; none if it has none."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    found = [getattr(layer, name, None) for layer in layers]  # of a model in stages, as Swin, a list
    numbers = dict.fromkeys(each for value in found for each in (value if isinstance(value, list | tuple) else [value]))
    return [number for number in numbers if isinstance(number, int)]


@functools.lru_cache  # inspect parses all of a class's file for it
def source_of(kind: type) -> str:
    """A class's code. Raises OSError or TypeError where it is in no file."""
    return textwrap.dedent(inspect.getsource(kind))


def _methods(kind: type) -> list[ast.AST]:
    """The code of a module's methods, but for __init__, and of those that they override if they call these.

    Empty where it is in no file.
    """
    try:
        kinds = kind.__mro__[: kind.__mro__.index(nn.Module)]
        trees = [ast.parse(source_of(each)).body[0] for each in kinds]
    except (OSError, TypeError, ValueError, SyntaxError):
        return []
    methods = {"__init__": []}
    for each in (each for tree in trees for each in tree.body):
        found = methods.setdefault(getattr(each, "name", "__init__"), [])
        if not found or "super()" in ast.unparse(found[-1]):
            found.append(each)
    del methods["__init__"]
    return [each for found in methods.values() for each in found]


@functools.lru_cache  # to find a Llama's classes' code takes 3 to 15 ms, and a model has hundreds of modules
def _heads_in_views(kind: type) -> list[str]:
    """The attributes, of heads by their names, that a module's code views features by, passes on, or makes lists of."""
    sizes = []
    for node in (node for method in _methods(kind) for node in ast.walk(method)):
        if isinstance(node, ast.Tuple | ast.List):
            sizes += node.elts
        elif isinstance(node, ast.Assign):
            sizes.append(node.value)
        elif isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            views = getattr(node.func, "attr", getattr(node.func, "id", None)) in VIEWS
            sizes += [size for each in given for size in ast.walk(each)] if views else given
    owned = (ast.unparse(size).removeprefix("self.") for size in sizes if isinstance(size, ast.Attribute))
    return list(dict.fromkeys(name for name in owned if re.fullmatch(r"(\w+\.)*\w*head\w*", name)))


def _takes_apart(parent: nn.Module, name: str) -> bool:
    """Whether a module takes apart what this child of it returns, or has another, as an nn.GLU, do so."""
    if isinstance(parent, nn.Sequential):
        children = list(parent._modules)
        after = children[children.index(name) + 1 :]
        weighted = [next(parent._modules[each].parameters(), None) is not None for each in after]
        after = after[: (*weighted, True).index(True) + 1]  # what reads that output, or does through others
    else:
        found = [by for child, by in _taken_apart(type(parent)) if child == name]
        if None in found:
            return True
        after = [by for by in found if by in parent._modules]
    kinds = [parent._modules[each] for each in after]
    return any(
        each.dim in (-1, 2) if isinstance(each, nn.GLU) else ("", None) in _taken_apart(type(each)) for each in kinds
    )


@functools.lru_cache
def _taken_apart(kind: type) -> set[tuple[str, str | None]]:
    """The names of a module's children whose outputs are several projections in one, as of these its code makes chunks
    of the last dimension, each with None, or with the name of the child that it passes them to. "": its own input.
    """
    found = set()
    for each in _operations(kind):
        # A number of features, as those of a head, makes as many pieces as there are, unless these have names.
        number = each.others[0] if each.others else each.keywords.get("split_size")
        counted = each.name != "split" or each.several or not isinstance(number, ast.Name | ast.Attribute)
        if counted and _splits(each.name, each.others, each.keywords):
            found.add((each.child, None))
        elif by := _called_child(each.call):
            found.add((each.child, by))
    return found


@functools.lru_cache
def _counted(kind: type) -> set[tuple[str, str]]:
    """The names of a module's children whose outputs its code views as so many parts as an attribute says, whatever
    these have, each with the attribute's: ("q", "n_head") of self.q(x).view(b, t, self.n_head, -1).
    """
    found = set()
    for each in _operations(kind):
        if each.name == "rearrange":  # "b t (h d) -> b h t d", with h=self.n_head
            pattern = re.search(r"\((\w+) (\w+)\) *->", ast.unparse(each.others[0])) if each.others else None
            number = each.keywords.get(pattern[1]) if pattern and pattern[2] not in each.keywords else None
        else:
            *_, number, last = (None, None, *(_sizes(each.name, each.others) if each.name in VIEWS else ()))
            number = number if last is not None and ast.unparse(last) == "-1" else None
        number = each.attributes.get(getattr(number, "id", None), number)
        if isinstance(number, ast.Attribute) and ast.unparse(number).startswith("self."):
            found.add((each.child, ast.unparse(number).removeprefix("self.")))
    return found


class _Operation(NamedTuple):
    """A call in a module's code of which the first operand is what a child has returned, or the module's own input.

    child: its name, or "". name: of what is called. several: whether what it returns gets several names. attributes:
    what names stand for.
    """

    child: str
    call: ast.Call
    name: str | None
    others: list[ast.AST]
    keywords: dict[str, ast.AST]
    several: bool
    attributes: dict[str, ast.Attribute | None]


def _operations(kind: type) -> Iterator[_Operation]:
    for method in _methods(kind):
        if not isinstance(method, ast.FunctionDef):
            continue
        method = _FirstTurns({}).visit(method)
        made = dict.fromkeys([each.arg for each in method.args.args[1:2] if method.name == "forward"], "")
        attributes = {}
        nodes = [node for node in ast.walk(method) if isinstance(node, ast.Assign | ast.Call)]
        assigned = (node for node in nodes if isinstance(node, ast.Assign))
        several = {node.value for node in assigned if isinstance(node.targets[0], ast.Tuple)}
        for node in sorted(nodes, key=_position):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                values = [value] if target is targets[0] else [None] * len(targets)
                if isinstance(value, ast.GeneratorExp | ast.ListComp):
                    values = [value.elt] * len(targets)
                elif isinstance(value, ast.Tuple) and len(value.elts) == len(values):
                    values = value.elts
                for name, value in zip(targets, values, strict=True):
                    if isinstance(name, ast.Name):
                        made[name.id] = _called_child(value)
                        attributes[name.id] = value if isinstance(value, ast.Attribute) else None
                continue
            name, is_method = getattr(node.func, "attr", getattr(node.func, "id", None)), False
            if isinstance(node.func, ast.Attribute):
                is_method = ast.unparse(node.func.value) not in _FUNCTIONS
            source, *rest = [node.func.value, *node.args] if is_method else node.args or [None]
            child = _called_child(source) or made.get(getattr(source, "id", None))
            if child is not None:
                keywords = {each.arg: each.value for each in node.keywords}
                yield _Operation(child, node, name, rest, keywords, node in several, attributes)


class _FirstTurns(ast.NodeTransformer):
    """Puts what a comprehension or a mapped lambda begins with in the place of its name: self.q in
    [f(x) for f in (self.q, self.k)].
    """

    def __init__(self, names: dict[str, ast.AST]):
        self._names = names

    def visit_Name(self, node):
        return self._names.get(node.id, node)

    def visit_GeneratorExp(self, node):
        node, loop = self.generic_visit(node), node.generators[0]
        node.elt = self._turn(node.elt, loop.target, loop.iter)
        return node

    visit_ListComp = visit_GeneratorExp

    def visit_Call(self, node):
        node = self.generic_visit(node)
        function = node.args[0] if getattr(node.func, "id", None) == "map" and len(node.args) > 1 else None
        if isinstance(function, ast.Lambda) and function.args.args:
            function.body = self._turn(function.body, ast.Name(function.args.args[0].arg), node.args[1])
        return node

    def _turn(self, body, name, items):
        known = isinstance(name, ast.Name) and isinstance(items, ast.Tuple | ast.List) and items.elts
        return _FirstTurns({name.id: items.elts[0]}).visit(body) if known else body


def _position(node: ast.AST) -> tuple[int, int]:
    """Where in the code it has an effect: a name is bound after what it is bound to has been computed."""
    if isinstance(node, ast.Assign):
        return node.end_lineno, node.end_col_offset
    return node.lineno, node.col_offset


def _splits(name: str, rest: list[ast.AST], keywords: dict[str, ast.AST]) -> bool:
    """Whether a call of this name splits the last dimension of its first operand into several whole projections."""
    if name in ("chunk", "tensor_split", "split", "glu"):
        dim = [*rest[name != "glu" :][:1], *filter(None, [keywords.get("dim")])]
        return ast.unparse(dim[0]) in ("-1", "2") if dim else name == "glu"
    if name == "rearrange":  # "b n (three h d) -> ...", with three=3
        pattern = re.search(r"\((\w+) [^)]*\) *->", ast.unparse(rest[0])) if rest else None
        return bool(pattern) and isinstance(keywords.get(pattern[1]), ast.Constant)
    if name not in VIEWS:
        return False
    sizes = [ast.unparse(size) for size in _sizes(name, rest)]  # a number of projections, then what is left of each
    numbers = [size for size in sizes[: sizes.index("-1") if "-1" in sizes else 0] if re.fullmatch(r"[2-9]", size)]
    return len(numbers) == 1 and not any(re.search(r"shape\[-1\]|size\(-1\)", size) for size in sizes)


def _sizes(view: str, rest: list[ast.AST]) -> list[ast.AST]:
    """Those that a view's operands ask for, but for the first dimension's."""
    sizes = rest[view == "unflatten" :]
    sizes = sizes[0].elts if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List) else sizes
    return sizes[view != "unflatten" :]


def _called_child(node: ast.AST | None) -> str | None:
    """The name of the child that an expression calls: "up" of self.up(x)."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called.removeprefix("self.") if re.fullmatch(r"self\.\w+", called) else None
