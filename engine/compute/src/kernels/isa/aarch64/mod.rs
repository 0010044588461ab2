//! AArch64, little-endian: NEON with and without dot products.

pub(in crate::kernels) mod neon;
