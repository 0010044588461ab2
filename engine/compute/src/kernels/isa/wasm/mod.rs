//! WebAssembly with simd128, with and without relaxed-simd.

pub(in crate::kernels) mod lanes;
#[cfg(target_feature = "relaxed-simd")]
pub(in crate::kernels) mod probe;
