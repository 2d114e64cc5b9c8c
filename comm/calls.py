"""Calls: what an operation is called with, how calls of one kind are prepared once, and what all ranks must agree on.

A call's options and what its tensors are like (`describe`) determine its grid, its schedules, its views of the
workspace and all but a few of its kernel's arguments. The first call of a kind prepares these, down to the launches of
its kernels; the next ones look that up, allocate a result, and launch with their own tensors.

What ranks share. In every call on a workspace each rank tells its peers the epoch and the number of the call that it
has begun (`device.begin_call`), and compares what it is told with its own (`device.end_call`). Once two numbers differ,
the two ranks exchange what stands behind them on the host. Where ranks meet on the host anyway, they compare all of it
(`Group.gather`).

Threads. Each rank would order the calls of two threads in its own way, and one thread's call on a rank would meet the
other's on a peer. So where calls overlap, the second is refused (`Turn`). Threads that take turns are welcome: as
autograd's, which run backward while the thread that called it waits.
"""

import functools
import itertools
import json
import reprlib
import sys
import threading
import zlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch

from tkernels.comm import capture
from tkernels.comm.arguments import check_dense

# 20 bits: of a million pairs of calls that differ, one has equal numbers. They share a word with the epoch, whose 43
# bits last for a year of calls that take 5 us each.
CALL_BITS = 20
FORM_BITS = 25  # of a message's form, for its bytes; the 6 bits above are its dtype's
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
MAX_PREPARED = 1024  # calls that a workspace keeps prepared, and as many of local operations in all


class Call(Protocol):
    """An operation with its options, a NamedTuple: an immutable one that takes 0.3 us to make and to look up.

    (A frozen dataclass of seven fields takes 1.0 us.) The options are the fields; with `describe` of the tensors they
    tell calls apart. Nothing that differs between calls of one kind may be read from the tensors but their addresses.
    """

    operation: str

    def shared(self, ctx, *tensors: torch.Tensor | None) -> dict:
        """The values by name that all ranks must pass alike."""

    def prepare(self, ctx, *tensors: torch.Tensor | None):
        """A function of tensors like these, in the same order, which carries out the call and returns its result.

        Raises ValueError or TypeError for what can't be, before the first signal. It keeps none of the tensors, and is
        valid until the current stream's workspace moves.
        """


def describe(tensor: torch.Tensor | None):
    """All properties of a tensor that a prepared call may depend on, including those that kernels are compiled for.

    The latter are the dtype and the alignment to 16 bytes.
    """
    if tensor is None:
        return None
    if isinstance(tensor, tuple):  # of tensors
        return tuple(map(describe, tensor))
    try:
        lazy = tensor.is_neg() or tensor.is_conj()
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16, lazy
    except RuntimeError:
        check_dense("tkernels", **{"an operand": tensor})
        raise


def form_of(dtype: torch.dtype, num_bytes: int) -> int:
    """A number, 31 bits, for the form of a message, the same at both its ends: its dtype, and its bytes up to 2**25."""
    return DTYPES.index(dtype) << FORM_BITS | min(num_bytes, (1 << FORM_BITS) - 1)


def form_name(form: int) -> str:
    dtype, num_bytes = divmod(form, 1 << FORM_BITS)
    return f"{num_bytes} bytes of {DTYPES[dtype]}"


class PreparedCalls:
    """A cache of what calls have been prepared to, by what tells them apart. It keeps the MAX_PREPARED newest."""

    def __init__(self):
        self._prepared = {}
        self._lock = threading.Lock()  # calls of local operations may come from several threads

    def __len__(self):
        return len(self._prepared)

    def find(self, key: tuple, prepare, *arguments):
        """What is kept for that key. If nothing is, `prepare(*arguments)` makes it."""
        try:
            found = self._prepared.get(key)
        except TypeError as error:  # parts of a key are hashed
            kind, fields = key[0], getattr(key[0], "_fields", ())
            named = itertools.zip_longest(fields, key[1:], fillvalue="option")
            odd = ", ".join(f"{name}={reprlib.repr(part)}" for name, part in named if not isinstance(part, Hashable))
            name = getattr(kind, "operation", kind.__name__)
            raise TypeError(f"{name}: {odd} is no value of an option ({error})") from error
        if found is None:
            with capture.lasting():
                found = prepare(*arguments)
            with self._lock:
                while len(self._prepared) >= MAX_PREPARED:
                    del self._prepared[next(iter(self._prepared))]
                self._prepared[key] = found
        return found

    def clear(self):
        with self._lock:
            self._prepared = {}


class LocalCalls(PreparedCalls):
    """Those of local operations, which need no context."""

    def call(self, kind: tuple, prepare, *tensors: torch.Tensor | None):
        """Carry out a call on the current stream of its first tensor's GPU, as `prepare` makes it for such tensors.

        kind: what tells calls of such tensors apart.
        """
        device = tensors[0].device
        if elsewhere(device):
            with torch.cuda.device(device):
                return self.call(kind, prepare, *tensors)
        return self.find((*kind, *map(describe, tensors)), prepare, *tensors)(*tensors)


local_calls = LocalCalls()


def elsewhere(device: torch.device) -> bool:
    """Whether that is a GPU, and another one is current: a new thread's is the first, whichever its rank's may be."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


@dataclass(frozen=True)
class Shared:
    """The name of a call's operation, and the values that all ranks must pass alike, by name, as text."""

    operation: str
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, operation: str, fields: dict) -> "Shared":
        return cls(operation, tuple((name, str(value)) for name, value in fields.items()))

    @functools.cached_property
    def number(self) -> int:
        """CALL_BITS bits, not all zero, which is what memory holds before the first call."""
        return zlib.crc32(repr((self.operation, self.fields)).encode()) % ((1 << CALL_BITS) - 1) + 1

    def to_json(self) -> str:
        return json.dumps([self.operation, self.fields])

    @classmethod
    def from_json(cls, text: str) -> "Shared":
        operation, fields = json.loads(text)
        return cls(operation, tuple(map(tuple, fields)))

    def __str__(self):
        return f"{self.operation}({', '.join(f'{name}={value}' for name, value in self.fields)})"


def in_step(words: list[int], rank: int) -> bool:
    """Whether every rank has begun the call that `rank` has begun last; words: a workspace's `begun`.

    One that has gone on to a later call has begun it too: it would not have got past it in another one.
    """
    mine = words[rank]
    return all(each == mine or each >> CALL_BITS > mine >> CALL_BITS for each in words)


def difference(first: int, call: Shared | None, second: int, other: Shared | None) -> str:
    """For errors: what two ranks' calls differ in. None: a call that its rank has not named."""
    if call is None or other is None or call.operation != other.operation:
        by_rank = (f"rank {rank} is in {each or 'another call'}" for rank, each in ((first, call), (second, other)))
        return f"the ranks are out of step: {'; '.join(by_rank)}; all must make the same calls in the same order"
    values = differing([dict(call.fields), dict(other.fields)])
    found = "; ".join(f"{name}: {a} on rank {first}, {b} on rank {second}" for name, (a, b) in values.items())
    return f"{call.operation}: the ranks' calls differ, in {found}; all must pass the same"


def differences(ranks: list[dict]) -> str:
    """For errors: what the dicts of all ranks differ in, as in "M by rank: 8, 10". Empty if they agree."""
    return "; ".join(f"{name} by rank: {', '.join(map(str, values))}" for name, values in differing(ranks).items())


def differing(ranks: list[dict]) -> dict[str, list]:
    """Every rank's value, by name, where they differ."""
    names = dict.fromkeys(name for each in ranks for name in each)
    found = {name: [each.get(name, "absent") for each in ranks] for name in names}
    return {name: values for name, values in found.items() if any(each != values[0] for each in values)}


class Turn:
    """For `with`: lets one thread in at a time, any number of times, and calls `refuse` for others that come meanwhile.

    refuse: a function that raises; takes two texts, which thread comes and which is inside, and where they are.
    """

    def __init__(self, refuse):
        self._refuse, self._lock, self._inside = refuse, threading.RLock(), None

    def __enter__(self):  # 0.4 us, with __exit__
        if not self._lock.acquire(False):
            frame = sys._current_frames().get(self._inside)
            self._refuse(_whereabouts(threading.get_ident(), sys._getframe(1)), _whereabouts(self._inside, frame))
        self._inside = threading.get_ident()

    def __exit__(self, *_):
        self._lock.release()


def _whereabouts(thread: int, frame) -> str:
    name = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))
    while frame is not None and not module_of(frame).startswith("tkernels."):  # what the library itself calls
        frame = frame.f_back
    function, line = place(frame) if frame is not None else ("a call", "which has ended")
    return f"thread {name!r} in {function} ({line})"


def place(frame) -> tuple[str, str]:
    """The library's function that the program called, and the line of the program, on the stack of this frame."""
    function = "a call of the program's own"
    while frame.f_back is not None and module_of(frame).split(".")[0] in ("tkernels", "torch", "triton", "contextlib"):
        if module_of(frame).startswith("tkernels."):
            function = frame.f_code.co_name
        frame = frame.f_back
    return function, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_of(frame) -> str:
    return frame.f_globals.get("__name__", "")
