"""Warp kernels that replace about a dozen torch operations by one launch each."""

# Warp compiles these functions, with types that are not Python types.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import warp as wp


@wp.kernel
def reset_envs(
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
    """Set the envs of `mask` to the given positions and velocities, with forces and controls at zero."""
    env = wp.tid()
    if not mask[env]:
        return
    time[env] = 0.0
    for i in range(qpos.shape[1]):
        qpos[env, i] = start_qpos[env, i]
    for i in range(qvel.shape[1]):
        qvel[env, i] = start_qvel[env, i]
        qacc_warmstart[env, i] = 0.0
        qfrc_applied[env, i] = 0.0
    for i in range(ctrl.shape[1]):
        ctrl[env, i] = 0.0
    for i in range(xfrc_applied.shape[1]):
        xfrc_applied[env, i] = wp.spatial_vector()


@wp.kernel
def detect_faults(
    # in
    max_value: float,
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
    """Mark and count the envs with an invalid state and those with one of `overflow_bits` set; clear the bits."""
    env = wp.tid()
    valid = bool(True)  # noqa: UP018 (Warp requires it for a variable that a loop changes)
    # Comparisons with NaN are false, so NaN is invalid.
    for i in range(qpos.shape[1]):
        valid = valid and wp.abs(qpos[env, i]) < max_value
    for i in range(qvel.shape[1]):
        valid = valid and wp.abs(qvel[env, i]) < max_value
    failed[env] = not valid
    if not valid:
        failures[env] = failures[env] + wp.int64(1)
    full = (overflow[env] & overflow_bits) != 0
    overflowed[env] = full
    if full:
        overflows[env] = overflows[env] + wp.int64(1)
    overflow[env] = 0
