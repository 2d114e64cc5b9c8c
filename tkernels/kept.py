"""keep_staged: copies of weights in rows that TMA can take, kept from call to call until a weight may have changed.

A weight is known by its memory, so that its views, detached ones and transposes too, find the copies that it has. The
caller names the weights: of other operands nobody knows who writes to them, as kernels do to buffers, uncounted.

What finds no room is copied in each call, and drives out nothing. Where weights take turns, to evict the one used least
recently would keep nothing at all of a model a little larger than the bound.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef

from tkernels.comm import capture
from tkernels.comm.arguments import check_dense, check_type
from tkernels.staging import Rows, in_rows

_steps = 0  # of all optimizers: some write to weights past torch's count of writes
_step_captured = False  # then its replays write, and run no hook
_copies: "StagedCopies | None" = None  # of the block that is entered


@register_optimizer_step_post_hook
def _count_step(*_):
    global _steps, _step_captured
    _steps, _step_captured = _steps + 1, _step_captured or capture.underway()


def optimizer_steps() -> int:
    """How many steps the optimizers of this process have made."""
    return _steps


@contextlib.contextmanager
def keep_staged(weights: Iterable[torch.Tensor], limit_bytes: int) -> "Iterator[StagedCopies]":
    """In the block, of all threads, what calls stage of these weights is kept for the next ones, up to limit_bytes.

        with tkernels.keep_staged(model.parameters(), limit_bytes=1 << 30):
            serve(model)

    Of a weight of 16 bits whose rows are no multiples of 16 bytes, `matmul` and the fused operations multiply a copy
    in wider rows, if they stage it; of fp32 as TF32, also one with K contiguous, where it is not. Kept, forward, its
    recomputation and backward take one copy, as TF32 one by each of its dimensions; of each stream one.
    weights: parameters and the like, DTensors too; they stay the caller's, and what is freed loses its copies.
    limit_bytes: of all copies. Those that find no room are made in each call, as without the block.
    Yields the StagedCopies; the end of the block gives their memory back.

    A copy is made anew once a weight may have changed: torch has counted a write to it or to a view of it, an
    optimizer has made a step, or the weight lies elsewhere. Nothing tells of writes by `weight.data`, by
    torch.distributed, as broadcast to weights, by torch._foreach operations to DTensors, by kernels that torch doesn't
    know, as fully_shard's gathers are, or by replayed CUDA graphs: after such, call `StagedCopies.forget`. Once a CUDA
    graph has captured an optimizer's step, nothing is kept any more. CUDA graphs neither use kept copies nor make any:
    each replay makes its own. Those that torch.compile(mode="reduce-overhead") makes have not been tried.
    Convert modules before the block: torch swaps no parameter that others refer to.
    The model that chooses who multiplies counts a copy that is kept as made.

    Raises ValueError for a limit_bytes below 1, inside another such block, or for weights that were made under
    torch.inference_mode(), whose writes torch doesn't count; TypeError for what is no tensor.
    """
    global _copies
    check_type("keep_staged: limit_bytes", limit_bytes, int, "a number of bytes")
    if limit_bytes < 1:
        raise ValueError(f"keep_staged: limit_bytes={limit_bytes} has room for nothing; pass 1 or more")
    copies = StagedCopies(_checked(weights), limit_bytes)
    del weights  # a list of them would keep them alive
    if _copies is not None:
        raise ValueError("keep_staged: copies are kept already; a block of keep_staged has no other inside")
    _copies = copies
    try:
        yield copies
    finally:
        _copies = None
        copies._close()


def _checked(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(weights, torch.Tensor | torch.nn.Module):
        words = "an iterable of tensors, as model.parameters() or [weight]"
        raise TypeError(f"keep_staged: weights is a {type(weights).__name__}, but must be {words}")
    weights = list(weights)
    check_dense("keep_staged", **{f"weights[{at}]": each for at, each in enumerate(weights)})
    for at, each in enumerate(weights):
        if each.is_inference() or _local(each).is_inference():
            raise ValueError(
                f"keep_staged: weights[{at}] was made under torch.inference_mode(), where torch counts no writes; make "
                f"it outside, or leave it out"
            )
    return weights


def keeps(w, turned: bool | None = None) -> bool:
    """Whether a staged copy of w [N, K] is kept, or would be if a call made it. w: as the caller passed it.

    turned: as in `Rows.of`, of fp32 as TF32, which takes it False; None: of 16 bits. Nothing else is staged.
    """
    copies = _copies
    itemsize = 2 if turned is None else 4
    if copies is None or not isinstance(w, torch.Tensor) or w.dtype.itemsize != itemsize or w.dim() != 2:
        return False
    if w.layout != torch.strided or w.is_nested or capture.underway():
        return False
    return 1 in w.stride() and 0 not in w.stride() and copies._keeps(w, turned)  # of others a clone is staged


def staged_weight(w: torch.Tensor, stage, turned: bool | None = None) -> torch.Tensor:
    """stage(w) [N, K], or what it gave of the same w before, where that is kept.

    stage: returns w in other rows; turned: as in `Rows.of`.
    """
    copies = _copies
    if copies is None or capture.underway():
        return stage(w)
    return copies._of(w, stage, turned)


@dataclass(eq=False)
class _Memory:
    """A storage: the weights in it, and copies of parts of it, each with the state of the weights that it is of."""

    storage: StorageWeakRef  # while it is there, no other storage has this one's number
    weights: list[WeakIdRef] = field(default_factory=list)
    copies: dict = field(default_factory=dict)

    def state(self) -> list[int] | None:
        """What changes as torch counts a write to any of the weights.

        None if one has died, or lies elsewhere now, or if nobody counts.
        """
        state = []
        for each in self.weights:
            weight = each()
            local = _local(weight)
            if local is None or local.untyped_storage()._cdata != self.storage.cdata or local.is_inference():
                return None
            state.append(local._version)
            if local is not weight:
                if weight.is_inference():
                    return None
                state.append(weight._version)
        return state


class StagedCopies:
    """What `keep_staged` keeps. bytes: what the copies take. forget(): gives them back; calls make them anew."""

    def __init__(self, weights: list[torch.Tensor], limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._lock, self._died, self._steps, self._taken = threading.Lock(), [], _steps, 0
        self._memories, self._where = {}, {}  # by the number of their storage, and that number by weight
        for weight in weights:
            self._locate(WeakIdRef(weight, self._on_death))

    @property
    def bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._taken

    def forget(self):
        with self._lock:
            self._settle()
            self._drop()

    def _drop(self):
        for memory in self._memories.values():
            self._give_back(memory)

    def _give_back(self, memory: _Memory, *keys):
        """The copies of these keys, or all of them."""
        for key in keys or tuple(memory.copies):
            _, copy = memory.copies.pop(key, (None, None))
            if copy is not None:
                self._taken -= copy.untyped_storage().nbytes()

    def _close(self):
        with self._lock:
            self._memories, self._where, self._taken = {}, {}, 0

    def _on_death(self, ref: WeakIdRef):
        """Runs anywhere, as the garbage collector does: where the lock is taken, perhaps by this thread."""
        self._died.append(ref)
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self):
        while self._died:
            self._leave(self._died.pop())

    def _settle(self):
        """Take leave of weights that have died, and find those again that lie elsewhere now."""
        self._bury()
        for ref, number in list(self._where.items()):
            local = _local(ref())
            if local is not None and local.untyped_storage()._cdata != number:
                self._locate(ref)

    def _leave(self, ref: WeakIdRef):
        memory = self._memories.get(self._where.pop(ref, None))
        if memory is not None:
            memory.weights.remove(ref)
            self._give_back(memory)
            if not memory.weights:
                del self._memories[memory.storage.cdata]

    def _locate(self, ref: WeakIdRef):
        self._leave(ref)
        storage = StorageWeakRef(_local(ref()).untyped_storage())
        memory = self._memories.setdefault(storage.cdata, _Memory(storage))
        memory.weights.append(ref)
        self._give_back(memory)
        self._where[ref] = storage.cdata

    def _memory_of(self, w: torch.Tensor) -> _Memory | None:
        number = w.untyped_storage()._cdata
        if number not in self._memories:  # it is of no weight, or of one that has moved
            weight = w if w._base is None else w._base
            ref = WeakIdRef(weight, self._on_death)
            if ref in self._where and weight.untyped_storage()._cdata == number:
                self._locate(ref)
        return self._memories.get(number)

    def _found(self, w: torch.Tensor, turned: bool | None) -> tuple[_Memory, tuple, list[int]] | None:
        """A weight's memory, what a copy of w is kept by, and what it must have been made at. None of other operands.

        3 us, and a call looks twice: what is multiplied is chosen before it is copied.
        """
        self._bury()
        if self._steps != _steps:
            self._steps = _steps
            self._drop()
        if _step_captured or w.is_inference() or (memory := self._memory_of(w)) is None:
            return None
        state = memory.state()
        if state is None:
            self._settle()
            memory = self._memory_of(w)
            state = memory and memory.state()
        if state is None:
            return None
        state.append(w._version)  # of memory that was a weight's, no weight counts the writes
        rows, lies_turned = in_rows(w)
        as_it_lies = turned in (None, lies_turned)
        stream = torch._C._cuda_getCurrentRawStream(w.device.index) if w.is_cuda else 0
        return memory, (rows.storage_offset(), rows.shape, rows.stride(), rows.dtype, as_it_lies, stream), state

    def _has_room(self, w: torch.Tensor, turned: bool | None) -> bool:
        return self._taken + Rows.of(w, turned=turned).bytes <= self.limit_bytes

    def _keeps(self, w: torch.Tensor, turned: bool | None) -> bool:
        with self._lock:
            found = self._found(w, turned)
            return found is not None and (found[1] in found[0].copies or self._has_room(w, turned))

    def _of(self, w: torch.Tensor, stage, turned: bool | None) -> torch.Tensor:
        with self._lock:
            found = self._found(w, turned)
            if found is None:
                return stage(w)
            memory, key, state = found
            made, copy = memory.copies.get(key, (None, None))
            lies_turned = in_rows(w)[1]
            if made != state:
                copy = None
                self._give_back(memory, key)  # before the next one takes memory
                copy = stage(w).t() if lies_turned else stage(w)
                if self._has_room(w, turned):
                    memory.copies[key] = state, copy
                    self._taken += copy.untyped_storage().nbytes()
        return copy.t() if lies_turned else copy


def _local(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Where a weight's elements lie: of a DTensor, the tensor that it holds."""
    return getattr(weight, "_local_tensor", weight)
