"""Small Warp kernels around MuJoCo Warp's own: one launch each for what would be a dozen torch operations."""

# Warp compiles these functions itself, with types that are not Python's.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import warp as wp


@wp.kernel
def restart(
    # in
    mask: wp.array[bool],
    start_qpos: wp.array2d[float],
    start_qvel: wp.array2d[float],
    # out
    time: wp.array[float],
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    qacc_warmstart: wp.array2d[float],
    ctrl: wp.array2d[float],
    qfrc_applied: wp.array2d[float],
    xfrc_applied: wp.array2d[wp.spatial_vector],
):
    """Put the worlds of `mask` into their starting state, forces and controls at zero."""
    world = wp.tid()
    if not mask[world]:
        return
    time[world] = 0.0
    for i in range(qpos.shape[1]):
        qpos[world, i] = start_qpos[world, i]
    for i in range(qvel.shape[1]):
        qvel[world, i] = start_qvel[world, i]
        qacc_warmstart[world, i] = 0.0
        qfrc_applied[world, i] = 0.0
    for i in range(ctrl.shape[1]):
        ctrl[world, i] = 0.0
    for i in range(xfrc_applied.shape[1]):
        xfrc_applied[world, i] = wp.spatial_vector()


@wp.kernel
def look_for_faults(
    # in
    largest: float,
    overflow_bits: int,
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    # in and out
    overflow: wp.array[int],
    failures: wp.array[wp.int64],
    overflows: wp.array[wp.int64],
    # out
    failed: wp.array[bool],
    overflowed: wp.array[bool],
):
    """Find and count the worlds with a bad state, or with one of `overflow_bits` set; clear those bits."""
    world = wp.tid()
    sane = bool(True)  # noqa: UP018 (Warp wants this for a variable that a loop changes)
    # A comparison with NaN is false, so a NaN is not sane.
    for i in range(qpos.shape[1]):
        sane = sane and wp.abs(qpos[world, i]) < largest
    for i in range(qvel.shape[1]):
        sane = sane and wp.abs(qvel[world, i]) < largest
    failed[world] = not sane
    if not sane:
        failures[world] = failures[world] + wp.int64(1)
    full = (overflow[world] & overflow_bits) != 0
    overflowed[world] = full
    if full:
        overflows[world] = overflows[world] + wp.int64(1)
    overflow[world] = 0
