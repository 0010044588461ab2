//! x86-64: AVX2 with and without VNNI, AVX-512 VNNI, AMX.

pub(in crate::kernels) mod amx;
pub(in crate::kernels) mod avx2;
pub(in crate::kernels) mod avx512;
