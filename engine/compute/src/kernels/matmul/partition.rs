//! Partition of matrix products into tasks: ranges of panels that one thread computes for all columns.

use alloc::vec::Vec;

use crate::kernels::matmul::{Columns, MatmulJob};
use crate::kernels::panel_layout::PanelLayout;

/// Panels `p0..p1` of a job.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct MatmulTask {
    pub(in crate::kernels) job: usize,
    pub(in crate::kernels) p0: usize,
    pub(in crate::kernels) p1: usize,
}

impl MatmulTask {
    /// The weights of these panels.
    pub(in crate::kernels) fn weights<'a>(&self, jobs: &[MatmulJob<'a>]) -> &'a [u8] {
        jobs[self.job].w.panels_of(self.p0..self.p1)
    }
}

/// Cuts the jobs into a few tasks per thread, so that idle threads can take over. With one column a task is a long
/// sequential read; with many columns tasks are small, as all threads wait for the last one.
pub(in crate::kernels) fn split_into_tasks(jobs: &[MatmulJob<'_>], threads: usize) -> Vec<MatmulTask> {
    let mut tasks = Vec::new();
    for (job, MatmulJob { w, x, .. }) in jobs.iter().enumerate() {
        let panels = w.panels();
        let whole = whole_panels(w.layout(), x);
        let long = MIN_TASK_BYTES.div_ceil(w.panel_bytes().max(1) * x.n().max(1));
        let n = match threads {
            1 => 1,
            _ => (panels / long.max(whole)).clamp(1, threads * 16).next_multiple_of(threads),
        };
        let cut = |i: usize| if i == n { panels } else { panels.min((panels * i / n).next_multiple_of(whole)) };
        tasks.extend((0..n).map(|i| MatmulTask { job, p0: cut(i), p1: cut(i + 1) }).filter(|t| t.p0 < t.p1));
    }
    tasks
}

/// Smallest size of a task, in bytes of weights times columns: long enough to stream.
const MIN_TASK_BYTES: usize = 64 * 1024;

/// Panels that share the loads of an AMX tile of columns; half as many for super-blocks.
pub(in crate::kernels) const AMX_PANELS: usize = 4;

/// Number of panels that fill whole register tiles on every instruction set, or that share AMX columns.
fn whole_panels(layout: &PanelLayout, x: &Columns<'_>) -> usize {
    match layout {
        _ if matches!(x, Columns::Packed(a) if a.layout.amx_columns(a.n) > 0) => AMX_PANELS,
        PanelLayout::Float => 4,
        PanelLayout::Blocks32(f) if f.words == 8 => 3,
        PanelLayout::Codes(f) if !f.is_super() => 3,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::act::Floats;
    use crate::kernels::panel::Matrix;
    use crate::quant::Dtype;
    use alloc::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tasks_cover_each_panel_once(rows in 1usize..3000, blocks in 1usize..40, dtype in prop::sample::select(vec![Dtype::Q4_0, Dtype::F32]), threads in 1usize..70) {
            let w = Matrix::zeroed(dtype, rows, blocks * 32).unwrap();
            let job = MatmulJob { w: &w, x: Columns::Plain(Floats { x: &[], stride: 1 }), out_column: 0, out_row: 0 };
            let mut next = 0;
            for MatmulTask { p0, p1, .. } in split_into_tasks(&[job], threads) {
                prop_assert!(p0 == next && p1 > p0);
                next = p1;
            }
            prop_assert_eq!(next, w.panels());
        }
    }
}
