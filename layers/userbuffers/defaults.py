"""The overlap of each GEMM of a layer and its options: the table of defaults, and how a configuration changes it.

A GEMM is named `<layer>_<pass>`. The layers qkv and fc1 are column parallel, proj and fc2 are row parallel.

    GEMM                      collective             default method
    qkv_fprop,  fc1_fprop     all-gather of x        ring_exchange
    proj_fprop, fc2_fprop     reduce-scatter of y    pipeline
    proj_dgrad, fc2_dgrad     all-gather of dy       ring_exchange
    qkv_dgrad,  fc1_dgrad     all-gather of x        bulk: beside the GEMM, for wgrad
    qkv_wgrad,  fc1_wgrad     reduce-scatter of dx   bulk: beside the GEMM, from dgrad
    proj_wgrad, fc2_wgrad     all-gather of dy       external: beside a GEMM of the caller

With any method other than bulk, qkv_dgrad or fc1_dgrad is a reduce-scatter of dx inside its GEMM, which replaces both
bulk overlaps. ring_exchange and pipeline name the same kernels here; only their options differ.

Everything in this file is pure: no rank, no device, no state between calls.
"""

import enum
from dataclasses import dataclass, fields, replace
from numbers import Integral


class UserBufferQuantizationMode(enum.Enum):
    """The data format of a set of communicators. With FP8 those that gather have buffers of FP8."""

    NONE = "none"
    FP8 = "fp8"


@dataclass(frozen=True)
class OverlapOptions:
    """The options of one GEMM's overlap, under the names that configurations use.

    Their effect on these kernels:

    method: ring_exchange, pipeline, bulk or external, as above.
    is_reduce_scatter: follows from the GEMM's name and the method; if given, it must agree.
    num_sm: the number of comm programs. For ring_exchange with use_ce the library chooses it.
    cga_size: no effect; the programs form no clusters.
    set_sm_margin: bulk: the GEMM beside the collective leaves num_sm SMs free. A fused kernel always has separate comm
        programs and compute programs.
    num_splits: pipeline: a rank's rows are sent in at least this many pieces, each of at least 16 rows. There are
        usually more, since by rule a piece has at most 128 rows. Rows are split, not features, so no remainder is lost.
    aggregate: ring_exchange all-gather: messages of twice the rows where comm programs send them. The copy engine sends
        whole shards. Works with any number of ranks.
    use_ce: ring_exchange: the copy engine (DMA) sends where that is faster: shares of 8 MB and more, if the peers'
        memory is mapped. Otherwise comm programs send. False: num_sm comm programs always send.
    atomic_gemm: refused; in every fused kernel tiles wait for their own rows.
    fp8_buf: of a reduce-scatter inside a GEMM, in the mode FP8: partial sums of FP8 operands travel in e4m3, with a
        scale for 128 columns of a row, which is lossy. What is gathered always is FP8 in that mode, and what is reduced
        beside a GEMM never is: True is refused there.
    comm_priority: priority of the communication stream, which runs the collectives beside GEMMs. 0: the device's
        highest.
    gemm_priority: must be 0; GEMMs run on the caller's stream, with its priority.
    pipeline_rs_overlap_first_gemm: no effect; the first tiles are always sent while the next ones are computed.
    """

    method: str
    is_reduce_scatter: bool
    num_sm: int
    cga_size: int
    set_sm_margin: bool
    num_splits: int
    aggregate: bool = False
    atomic_gemm: bool = False
    use_ce: bool = True
    fp8_buf: bool = False
    comm_priority: int = 0
    gemm_priority: int = 0
    pipeline_rs_overlap_first_gemm: bool = False

    def checked(self, where) -> "OverlapOptions":
        """The same with booleans for 0 and 1. `where(option)` begins the error for one that is wrong.

        Raises TypeError for values of a wrong type, ValueError for those that these kernels have no use for.
        """
        options = replace(self, **{key: checked_option(where(key), key, value) for key, value in vars(self).items()})
        if options.atomic_gemm:
            raise ValueError(
                f"{where('atomic_gemm')}: atomic_gemm=True is not supported, as in every fused kernel tiles wait for "
                f"their own rows; pass False"
            )
        if options.gemm_priority != 0:
            raise ValueError(
                f"{where('gemm_priority')}: gemm_priority={options.gemm_priority}, but GEMMs run on the caller's "
                f"stream, which has a priority already; pass 0, and call from a stream with the priority that you want"
            )
        return options

    @property
    def without_effect(self) -> dict[str, str]:
        """{option: reason} for the options that have no effect with this method."""
        reasons = {
            "cga_size": "the programs form no clusters",
            "fp8_buf": "the quantization mode and the collective determine what travels",
            "pipeline_rs_overlap_first_gemm": "the first tiles are always sent while the next ones are computed",
        }
        if self.method in ("ring_exchange", "pipeline"):
            reasons["set_sm_margin"] = "a fused kernel always has dedicated comm programs"
            reasons["comm_priority"] = "communication inside a GEMM runs on the GEMM's stream"
        if self.method == "external":
            reasons["set_sm_margin"] = "the GEMM beside it is the caller's"
        if self.method != "ring_exchange":
            reasons["use_ce"] = f"{self.method} has no copies for the copy engine"
        elif self.use_ce:
            reasons["num_sm"] = "with use_ce the library chooses what carries the data"
        if self.method != "pipeline":
            reasons["num_splits"] = f"{self.method} sends no pieces of that kind"
        if self.method != "ring_exchange" or self.is_reduce_scatter:
            reasons["aggregate"] = "only a ring_exchange all-gather sends whole shards"
        return reasons


_COLUMN, _ROW = ("qkv", "fc1"), ("proj", "fc2")
_WAYS = {  # the methods that each GEMM allows, its default first
    **{f"{layer}_fprop": ("ring_exchange",) for layer in _COLUMN},
    **{f"{layer}_dgrad": ("ring_exchange",) for layer in _ROW},
    **{f"{layer}_fprop": ("pipeline", "ring_exchange") for layer in _ROW},
    **{f"{layer}_dgrad": ("bulk", "ring_exchange", "pipeline") for layer in _COLUMN},
    **{f"{layer}_wgrad": ("bulk",) for layer in _COLUMN},
    **{f"{layer}_wgrad": ("external",) for layer in _ROW},
}
_SWITCHABLE = tuple(f"{layer}_dgrad" for layer in _COLUMN)
_METHODS = ("ring_exchange", "pipeline", "bulk", "external")
_BOOLEAN = tuple(field.name for field in fields(OverlapOptions) if field.type is bool)
_COUNTS = ("num_sm", "cga_size", "num_splits")


def methods(with_cublasmp: bool = False) -> dict[str, tuple[str, ...]]:
    """{GEMM: its allowed methods, the default first} for every GEMM that has an overlap."""
    if not with_cublasmp:
        return dict(_WAYS)
    return {
        name: tuple(way for way in ways if way not in ("bulk", "external"))
        for name, ways in _WAYS.items()
        if not name.endswith("_wgrad")
    }


def default_config(
    tp_size: int, *, with_cublasmp: bool = False, comm_priority: int = 0, gemm_priority: int = 0
) -> dict[str, OverlapOptions]:
    """The default options of every GEMM that has an overlap. Raises ValueError unless tp_size is a number of ranks."""
    if type(tp_size) is not int or tp_size < 1:
        raise ValueError(f"tp_size={tp_size!r} must be a positive number of ranks")
    ways = methods(boolean("default_config: with_cublasmp", with_cublasmp))
    priorities = {"comm_priority": comm_priority, "gemm_priority": gemm_priority}
    priorities = {key: integer(f"default_config: {key}", value) for key, value in priorities.items()}
    return {name: replace(_defaults(name, ways[name][0], tp_size), **priorities) for name in ways}


def _defaults(name: str, method: str, tp_size: int) -> OverlapOptions:
    numbers = dict(num_sm=16, cga_size=2, set_sm_margin=True, num_splits=4)
    if method == "ring_exchange":
        numbers = dict(num_sm=1, cga_size=1, set_sm_margin=False, num_splits=tp_size)
    reduces = _is_reduce_scatter(name, method)
    return OverlapOptions(method, reduces, fp8_buf=not reduces, **numbers)


def _is_reduce_scatter(name: str, method: str) -> bool:
    layer, of = name.split("_")
    if of == "dgrad":
        return layer in _COLUMN and method != "bulk"
    return (layer in _ROW) == (of == "fprop")


def configure(
    ub_cfg: dict | None, tp_size: int, *, with_cublasmp: bool = False, fp8: bool = False
) -> dict[str, OverlapOptions]:
    """The options of every GEMM's communicator: the defaults, changed by a user's `{GEMM: {option: value}}`.

    An entry of None keeps the defaults. Booleans may be given as 0 and 1, and any value as a tuple or list of length
    one. Where a configuration changes the method of proj_fprop or fc2_fprop, the other options keep the defaults of
    pipeline; for qkv_dgrad and fc1_dgrad they become those of the new method. fp8: of the mode FP8. Raises ValueError
    or TypeError that names the GEMM, the option and the allowed values.
    """
    if ub_cfg is not None and not isinstance(ub_cfg, dict):
        raise TypeError(f"ub_cfgs: a configuration is a dict of GEMMs, not {type(ub_cfg).__name__}")
    allowed = methods(with_cublasmp)
    given, options = _entries(ub_cfg or {}, allowed, with_cublasmp), {}
    for name, ways in allowed.items():
        entry = given.get(name, {})
        method = _method(name, entry, ways, with_cublasmp)
        base = _defaults(name, method if name in _SWITCHABLE else ways[0], tp_size)
        reduces = _is_reduce_scatter(name, method)
        if entry.get("is_reduce_scatter", reduces) != reduces:
            what = "a reduce-scatter" if reduces else "an all-gather"
            raise ValueError(f"ub_cfgs[{name!r}]: {method} of {name} is {what}; leave is_reduce_scatter out")
        where = f"ub_cfgs[{name!r}]"
        if fp8 and reduces and method == "bulk" and entry.get("fp8_buf"):
            raise ValueError(
                f"{where}: fp8_buf=True would send sums in FP8 beside a GEMM, which these kernels don't; pass "
                f"fp8_buf=False, for sums of FP8 products that travel in bf16 and add up in fp32"
            )
        options[name] = replace(base, **entry | {"is_reduce_scatter": reduces}).checked(lambda key, where=where: where)
    for dgrad in _SWITCHABLE:
        wgrad = dgrad.replace("dgrad", "wgrad")
        if wgrad in options and options[dgrad].method != "bulk":
            if wgrad in given:
                raise ValueError(
                    f"ub_cfgs: {dgrad} has method {options[dgrad].method!r}, which reduces dx inside its GEMM and "
                    f"leaves {wgrad} no overlap; drop the entry of {wgrad}, or give {dgrad} the method 'bulk'"
                )
            del options[wgrad]
    return options


def _entries(ub_cfg: dict, allowed: dict, with_cublasmp: bool) -> dict[str, dict]:
    names = {field.name for field in fields(OverlapOptions)}
    entries = {}
    for name, entry in ub_cfg.items():
        if name not in _WAYS:
            raise ValueError(f"ub_cfgs: there is no GEMM {name!r}; there are {', '.join(_WAYS)}")
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise TypeError(f"ub_cfgs[{name!r}]: must be a dict of options or None, not {type(entry).__name__}")
        if name not in allowed:
            raise ValueError(
                f"ub_cfgs[{name!r}]: with_cublasmp=True has no bulk or external overlap, so {name} has none; drop the "
                f"entry, or pass with_cublasmp=False"
            )
        for key in entry:
            if key not in names:
                raise ValueError(f"ub_cfgs[{name!r}]: there is no option {key!r}; there are {', '.join(sorted(names))}")
        entries[name] = {key: checked_option(f"ub_cfgs[{name!r}][{key!r}]", key, value) for key, value in entry.items()}
    return entries


def checked_option(where: str, key: str, value):
    """The value of an option, with a boolean for 0 and 1. Raises TypeError, which begins with `where`."""
    if isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]  # published presets contain (False,)
    if key in _BOOLEAN:
        return boolean(where, value)
    return value if key == "method" else integer(where, value, positive=key in _COUNTS)


def boolean(where: str, value) -> bool:
    if not isinstance(value, Integral) or value not in (0, 1):
        raise TypeError(f"{where}: {value!r} must be a boolean, or 0 or 1")
    return bool(value)


def integer(where: str, value, positive: bool = False) -> int:
    if type(value) is not int or (positive and value < 1) or abs(value) >> 31:
        raise TypeError(f"{where}: {value!r} must be {'a positive' if positive else 'an'} integer, of 32 bits")
    return value


def _method(name: str, entry: dict, ways: tuple[str, ...], with_cublasmp: bool) -> str:
    method = entry.get("method", ways[0])
    if method in ways:
        return method
    if method not in _METHODS:
        raise ValueError(f"ub_cfgs[{name!r}]: there is no method {method!r}; {name} can have {', '.join(ways)}")
    if method == "pipeline":
        raise ValueError(
            f"ub_cfgs[{name!r}]: `pipeline` overlap method is not supported for AllGather; {name} can have "
            f"{', '.join(ways)}"
        )
    backend = " with with_cublasmp=True" if with_cublasmp and method in _WAYS[name] else ""
    raise ValueError(f"ub_cfgs[{name!r}]: {name} can't have method {method!r}{backend}; it can have {', '.join(ways)}")


def without_effect(
    ub_cfg: dict | None, options: dict[str, OverlapOptions], tp_size: int, fp8: bool = False
) -> list[str]:
    """One line for each option that a configuration sets to other than its default, without any effect here.

    fp8: of the mode FP8.
    """
    lines = []
    for name, entry in (ub_cfg or {}).items():
        if name not in options:
            continue
        mine = options[name]
        reasons, default = mine.without_effect, _defaults(name, mine.method, tp_size)
        if fp8 and mine.is_reduce_scatter:
            del reasons["fp8_buf"]
        for key in entry or ():
            if key in reasons and getattr(mine, key) != getattr(default, key):
                lines.append(f"{name}.{key}={getattr(mine, key)!r}: {reasons[key]}")
    return lines
