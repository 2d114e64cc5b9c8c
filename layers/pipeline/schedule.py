"""The order of a pipeline's steps: 1F1B and interleaved 1F1B, as lists of turns, built before anything runs.

R ranks.  V chunks of the model on each rank.  m microbatches.  Chunk c of rank r is part c * R + r of the model.

    R = 2, V = 1, m = 4        rank 0    F0 F1 B0 F2 B1 F3 B2 B3
                               rank 1       F0 B0 F1 B1 F2 B2 F3 B3

A turn is one step, or a forward and a backward. Between two turns there is one exchange: it sends the results of the
turn before, and receives the inputs of a turn to come. Without overlap that is the next turn, and the exchange is
waited for. With overlap, turns are single steps, and the inputs are those of the step after the next one. Meanwhile the
next step computes on inputs that were received before.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Forward or backward of one microbatch through one of this rank's chunks."""

    forward: bool
    microbatch: int
    chunk: int

    def __str__(self):
        return f"{'F' if self.forward else 'B'}{self.microbatch}.{self.chunk}"


def schedule(
    rank: int, size: int, num_chunks: int, num_microbatches: int, *, forward_only: bool = False, overlap: bool = False
) -> list[tuple[Step, ...]]:
    """The turns of a rank: 1F1B for one chunk, interleaved 1F1B for several.

    Several chunks without overlap use turns of two steps, which avoids a deadlock: if a rank waited for the receiver of
    its forward before it ran its backward, the backward of that receiver could be waiting for this rank.

    Raises ValueError if interleaved microbatches are not a multiple of the ranks, or if there is one rank to
    interleave.
    """
    if num_chunks > 1 and (size == 1 or num_microbatches % size):
        raise ValueError(
            f"pipeline: {num_chunks} chunks a rank take at least 2 ranks, of which the number of microbatches is a "
            f"multiple; there are {size} ranks and {num_microbatches} microbatches"
        )
    total = num_microbatches * num_chunks
    forwards, backwards = [], []
    for k in range(total):
        # A round takes `size` microbatches through chunk 0, then the same ones through chunk 1, and so on.
        round, within = divmod(k, size * num_chunks)
        chunk, microbatch = within // size, round * size + within % size
        forwards.append(Step(True, microbatch, chunk))
        backwards.append(Step(False, microbatch, num_chunks - 1 - chunk))
    if forward_only:
        return [(step,) for step in forwards]
    if num_chunks == 1:
        warmup = size - rank - 1
    else:
        warmup = 2 * (size - rank - 1) + (num_chunks - 1) * size
    warmup = min(warmup, total)
    steady = list(zip(forwards[warmup:], backwards, strict=False))
    if overlap or num_chunks == 1:
        steady = [(step,) for pair in steady for step in pair]
    return [(step,) for step in forwards[:warmup]] + steady + [(step,) for step in backwards[total - warmup :]]
