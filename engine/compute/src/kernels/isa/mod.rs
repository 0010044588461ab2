//! One folder per architecture: the lane types of its instruction sets, and what only it has. `Cpu` is their only user
//! besides the AMX products.

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
pub(super) mod aarch64;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
pub(super) mod features;
#[cfg(all(target_family = "wasm", target_feature = "simd128"))]
pub(super) mod wasm;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86_64;
