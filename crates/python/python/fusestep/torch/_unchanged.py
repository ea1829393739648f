"""Changes between ``backward`` and ``step`` that would part ranks: each is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from fusestep.torch._options import ACCUMULATE, CLIP_NORM

if TYPE_CHECKING:
    from fusestep.torch._ranks import DataParallel

AGAIN = (
    "go on from a checkpoint: `close()`, and `resume` of another DataParallel with an optimizer of "
    "its own"
)
INSTEAD = (
    f"the optimizer's `{ACCUMULATE}=` adds those of several, and `close()` ends a DataParallel "
    "whose model another one trains"
)
TAKEN = (
    "expected `optimizer.step()` next, because ranks have it, with `zero=2`, `zero=3` or updates in "
    f"backward (two backward passes are added by the optimizer's `{ACCUMULATE}=`, clipped by "
    f"`{CLIP_NORM}=`, scaled by `loss_scale=`)"
)


def refuse_others(parallel: DataParallel) -> None:
    """Parameters that ranks do not have would be left out of the step."""
    groups = parallel._optimizer.param_groups
    if [id(tensor) for group in groups for tensor in group["params"]] != parallel._everybody:
        raise RuntimeError(
            "optimizer: expected the parameters that it had when `DataParallel` was made, "
            "found others in its groups; make another `DataParallel` behind `close()`"
        )
    for member in parallel._frozen:
        if member.tensor.grad is not None:
            raise RuntimeError(
                f"gradient of `{member.name}`: expected none, because the parameter was frozen "
                "when `DataParallel` was made, found one; make another behind `close()`"
            )


def refuse_written_gradients(parallel: DataParallel) -> None:
    """Autograd adds to a gradient before its hook can refuse that, and others write to it or
    drop it freely; what ranks have averaged meanwhile is neither the one nor the other."""
    written = _written_gradient(parallel)
    if written is not None:
        # Others would wait until this rank is late, where it alone has done that.
        parallel._ranks.abort(written)
        raise RuntimeError(written)


def _written_gradient(parallel: DataParallel) -> Optional[str]:
    for index, tensor in enumerate(parallel._tensors):
        gradient, given = tensor.grad, parallel._given.get(index)
        if given is None:
            if gradient is None or not parallel._handles:
                continue
            expected, found = "one that `backward` brings to ranks", "one that was set"
            works = "give it by `parameter.backward(gradient)`"
        elif gradient is not given.gradient:
            expected = "what `backward` has left there, which ranks average"
            found = "it dropped" if gradient is None else "another one"
            works = (
                f"{AGAIN}; the optimizer's `{CLIP_NORM}=` and `loss_scale=` skip steps with "
                "gradients that are not finite, on all ranks"
            )
        elif given.counts._version != given.version:
            expected = "what `backward` has left there"
            found = "it written while ranks average it"
            works = (
                f"parameters are those of the last step: {AGAIN}; the optimizer's "
                f"`{CLIP_NORM}=` and `{ACCUMULATE}=` may be what was meant"
            )
        else:
            continue
        name = parallel._members[index].name
        return f"gradient of `{name}`: expected {expected}, found {found}; {works}"
    return None


def refuse_written_parameters(parallel: DataParallel) -> None:
    """Ranks would go on from different values, or train memory that the model has left."""
    pairs = zip(parallel._full, parallel._values)
    moved = [tensor for tensor, value in pairs if tensor.data_ptr() != value.data_ptr()]
    members = [parallel._members[parallel._index[id(tensor)]] for tensor in moved]
    if parallel._whole is not None:
        members = parallel._whole.moved()
    for member in members:
        raise RuntimeError(
            f"parameter `{member.name}`: expected the memory of the ranks, found it moved to other "
            "memory since; call `follow_parameters()` on all ranks after that, or `close()` if "
            "another DataParallel trains the model now"
        )
    for member, version in zip(parallel._members, parallel._versions):
        if member.tensor._version != version:
            raise RuntimeError(
                f"parameter `{member.name}`: expected the values of the last step, found it "
                "written since; call `follow_parameters()` on all ranks after that"
            )


def refuse_other_rules(parallel: DataParallel) -> None:
    """Raises where settings have changed since parameters were updated with them."""
    if parallel._used is not None and parallel._used != parallel._rules():
        found = (
            "optimizer: expected the settings of its groups with which `backward` has updated "
            f"parameters, found others; change them behind `step`; {AGAIN}"
        )
        parallel._ranks.abort(found)
        raise RuntimeError(found)
