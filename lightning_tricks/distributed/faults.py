"""Say what it means when a collective fails: mostly, that another rank is gone."""

import re

__all__ = ["explain_"]

_LOST = re.compile(
    r"Connection (closed|reset|refused)|[Tt]imed? ?out|Broken pipe|NCCL (error|communicator)|remote process"
)
_MIXED = re.compile(r"mixed torch\.Tensor and DTensor")
_UNSUPPORTED = re.compile(r"sharding strategy registered|data is not allocated yet")


def explain_(error: BaseException, rank: int) -> None:
    """Add a note to an error that comes from a collective or from a parameter that was not gathered.

    Args:
        error: what was raised.
        rank: this process's.

    Example:
        >>> error = RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        >>> explain_(error, 0)
        >>> error.__notes__[0][:40]
        'Rank 0 lost contact with another rank, w'
    """
    if not isinstance(error, RuntimeError) or "DataLoader" in str(error):
        return
    if _LOST.search(str(error)):
        error.add_note(
            f"Rank {rank} lost contact with another rank, which has ended or hangs: its own output says why. "
            "The last complete checkpoint resumes: fit(..., ckpt_path=...)"
        )
    elif _MIXED.search(str(error)):
        error.add_note(
            "A parameter was used outside of the forward of its sharding unit, so that it was not gathered. In a step, "
            "keep the module that holds it out of the units: FSDP2Strategy(<the blocks alone>). Outside of the steps, "
            "call the module itself, self(...), on every rank"
        )
    elif _UNSUPPORTED.search(str(error)):
        error.add_note(
            "torch has no such operation for sharded parameters or gradients (DTensors). For the norm of gradients "
            "list GradientNormClipping, which logs grad/norm; for the whole of a parameter call its full_tensor() on "
            "every rank"
        )
