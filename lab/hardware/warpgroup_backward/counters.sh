#!/bin/sh
# Counters of the main kernel's second launch: counters.sh PLAN.json VARIANT...
plan=$1
shift
exec ncu --clock-control none --launch-skip 1 --launch-count 1 \
  -k 'regex:kernel_cutlass_kernel_cutlasscuteatomCopyAtom' --csv --page raw --metrics \
sm__cycles_active.avg,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,\
smsp__inst_executed.sum,sm__inst_issued.avg.pct_of_peak_sustained_active,\
l1tex__data_pipe_lsu_wavefronts_mem_shared.sum,l1tex__data_pipe_lsu_wavefronts.sum,\
l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum,lts__t_bytes.sum,\
smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio,\
smsp__average_warps_issue_stalled_wait_per_issue_active.ratio,gpu__time_duration.sum \
  python -m lab.hardware.warpgroup_backward.measure /dev/null --plan "$plan" --once "$@"
