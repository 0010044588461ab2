//! Choice of the instruction set at run time, and dispatch of operations to it.
#![allow(unsafe_code)]

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
use super::isa::features::{has_feature, has_features, isa_features};
use super::simd::{Prefetch, Simd};

/// An instruction-set path. All paths give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Isa {
    Scalar,
    Avx2,
    AvxVnni,
    Avx512Vnni,
    /// As `Avx512Vnni`, with AMX tile products for 32 columns and more.
    Amx,
    Neon,
    NeonDotprod,
    Simd128,
    /// As `RelaxedSimd`, but dots of 4-bit weights accumulate pairs in i16 and dots of 8-bit weights are those of
    /// `Simd128`: faster where the engine needs several instructions for the relaxed dot product, as on x86 without
    /// VNNI. A module cannot detect that; a host with a clock can measure it (`isa_benchmark`).
    RelaxedI16,
    RelaxedSimd,
}

impl Isa {
    /// All paths, slowest first.
    pub const ALL: [Isa; 10] = [
        Isa::Scalar,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512Vnni,
        Isa::Amx,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::Simd128,
        Isa::RelaxedI16,
        Isa::RelaxedSimd,
    ];

    /// The name that `--isa` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon-dotprod",
            Isa::Simd128 => "simd128",
            Isa::RelaxedI16 => "relaxed-i16",
            Isa::RelaxedSimd => "relaxed-simd",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether this build contains the scalar path.
#[cfg(target_family = "wasm")]
const HAS_SCALAR: bool = cfg!(any(feature = "scalar", not(target_feature = "simd128")));

/// An instruction set that this machine has. Only detection creates a value, so holding one proves that its
/// instructions may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    isa: Isa,
    prefetch: Prefetch,
}

/// `--isa` named a path that does not exist or that this machine does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("instruction set `{name}`: unknown or not available on this machine, expected one of: {}", available.join(", "))]
pub struct UnknownIsa {
    /// The name that was asked for.
    pub name: String,
    /// The names of the paths of this machine.
    pub available: Vec<&'static str>,
}

impl Cpu {
    /// The scalar path: available on every machine, and the definition of all results.
    #[cfg(any(feature = "scalar", not(all(target_family = "wasm", target_feature = "simd128"))))]
    pub const SCALAR: Cpu = Cpu { isa: Isa::Scalar, prefetch: Prefetch::DEFAULT };

    /// The simd128 path of a relaxed-simd build, for the probe.
    #[cfg(all(target_family = "wasm", target_feature = "relaxed-simd"))]
    pub(super) const SIMD128: Cpu = Cpu { isa: Isa::Simd128, prefetch: Prefetch::DEFAULT };

    fn of(isa: Isa) -> Cpu {
        Cpu { isa, prefetch: prefetch_policy() }
    }

    /// The fastest path of this machine.
    pub fn detect() -> Cpu {
        // never falls back: `is_available` accepts at least the slowest path of a build
        Cpu::of(Isa::ALL.into_iter().rfind(|&isa| is_available(isa)).unwrap_or(Isa::Scalar))
    }

    /// Every path of this machine, slowest first.
    pub fn available() -> Vec<Cpu> {
        Isa::ALL.into_iter().filter(|&isa| is_available(isa)).map(Cpu::of).collect()
    }

    /// Every path of this machine with every prefetch policy.
    #[cfg(test)]
    pub(crate) fn all_variants() -> Vec<Cpu> {
        #[cfg(target_arch = "x86_64")]
        let policies = [Prefetch::DEFAULT, Prefetch::OFF, Prefetch::AHEAD_8_KIB];
        #[cfg(not(target_arch = "x86_64"))]
        let policies = [Prefetch::DEFAULT];
        Cpu::available().into_iter().flat_map(|cpu| policies.map(|prefetch| Cpu { prefetch, ..cpu })).collect()
    }

    /// The path of that name.
    ///
    /// # Errors
    /// If this machine does not have it.
    pub fn named(name: &str) -> Result<Cpu, UnknownIsa> {
        let available = Cpu::available();
        available.iter().copied().find(|c| c.isa.name() == name).ok_or_else(|| UnknownIsa {
            name: name.into(),
            available: available.iter().map(|c| c.isa.name()).collect(),
        })
    }

    /// The path.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// The AMX tiles, if this path uses them.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn amx(self) -> Option<super::isa::x86_64::amx::Amx> {
        // SAFETY: a `Cpu` of that `Isa` exists only if `is_available` said that the machine has the features.
        (self.isa == Isa::Amx).then(|| unsafe {
            super::isa::x86_64::amx::Amx::new(super::isa::x86_64::avx512::Avx512::new(self.prefetch))
        })
    }

    /// Runs an operation on this instruction set.
    #[inline]
    pub(crate) fn run<O: Op>(self, op: O) -> O::Out {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Cpu` of this `Isa` exists only if `is_available` found its features.
            Isa::Avx2 => unsafe {
                super::isa::x86_64::avx2::run(super::isa::x86_64::avx2::Avx2::<false>::new(self.prefetch), op)
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Cpu` of this `Isa` exists only if `is_available` found its features.
            Isa::AvxVnni => unsafe {
                super::isa::x86_64::avx2::run_vnni(super::isa::x86_64::avx2::Avx2::<true>::new(self.prefetch), op)
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Cpu` of this `Isa` exists only if `is_available` found its features.
            Isa::Avx512Vnni | Isa::Amx => unsafe {
                super::isa::x86_64::avx512::run(super::isa::x86_64::avx512::Avx512::new(self.prefetch), op)
            },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Isa::Neon => op.simd(super::isa::aarch64::neon::Neon::<false>::new()),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            // SAFETY: a `Cpu` of this `Isa` exists only if `is_available` found its features.
            Isa::NeonDotprod => unsafe {
                super::isa::aarch64::neon::run_dotprod(super::isa::aarch64::neon::Neon::<true>::new(), op)
            },
            #[cfg(all(target_family = "wasm", target_feature = "relaxed-simd"))]
            Isa::RelaxedI16 if const { O::DOTS } => op.simd(super::isa::wasm::lanes::Wasm::<true, true>::new()),
            #[cfg(all(target_family = "wasm", target_feature = "relaxed-simd"))]
            Isa::RelaxedSimd | Isa::RelaxedI16 => op.simd(super::isa::wasm::lanes::Wasm::<true>::new()),
            #[cfg(all(target_family = "wasm", target_feature = "simd128"))]
            isa if isa == Isa::Simd128 || !HAS_SCALAR => op.simd(super::isa::wasm::lanes::Wasm::<false>::new()),
            _ => op.scalar(),
        }
    }
}

/// An operation: its scalar definition and its SIMD body.
pub(crate) trait Op: Sized {
    /// Type of the result.
    type Out;
    /// Whether the operation multiplies quantised weights or packs activations for that: the operations for which
    /// [`Isa::RelaxedI16`] differs from [`Isa::RelaxedSimd`].
    #[allow(dead_code)] // read on WebAssembly only
    const DOTS: bool = false;
    /// The definition: plain loops in the canonical order.
    fn scalar(self) -> Self::Out;
    /// The same arithmetic on lanes. The body and all its helpers must be `#[inline(always)]`, or they are compiled
    /// without the CPU features.
    fn simd<S: Simd>(self, s: S) -> Self::Out;
}

/// Prefetch policy of this processor, by vendor and family.
#[cfg(target_arch = "x86_64")]
fn prefetch_policy() -> Prefetch {
    let vendor = core::arch::x86_64::__cpuid(0);
    if (vendor.ebx, vendor.edx, vendor.ecx) != (AMD[0], AMD[1], AMD[2]) {
        return Prefetch::DEFAULT;
    }
    let signature = core::arch::x86_64::__cpuid(1).eax;
    let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    if family < ZEN5 { Prefetch::OFF } else { Prefetch::AHEAD_8_KIB }
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch_policy() -> Prefetch {
    Prefetch::DEFAULT
}

/// First AMD family with Zen 5 cores.
#[cfg(target_arch = "x86_64")]
const ZEN5: u32 = 0x1a;

/// "AuthenticAMD", as `cpuid` spells it.
#[cfg(target_arch = "x86_64")]
const AMD: [u32; 3] = [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"enti"), u32::from_le_bytes(*b"cAMD")];

/// Whether the processor has AMX with int8 dot products (CPUID.7.0:EDX bits 24 and 25).
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    const TILE_AND_INT8: u32 = 3 << 24;
    core::arch::x86_64::__cpuid(0).eax >= 7
        && core::arch::x86_64::__cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8
}

#[cfg(target_arch = "x86_64")]
fn is_available(isa: Isa) -> bool {
    match isa {
        Isa::Scalar => true,
        Isa::Avx2 => isa_features!(Avx2, has_features),
        Isa::AvxVnni => isa_features!(AvxVnni, has_features),
        Isa::Amx => is_available(Isa::Avx512Vnni) && has_amx() && super::isa::x86_64::amx::is_permitted(),
        Isa::Avx512Vnni => isa_features!(Avx512Vnni, has_features),
        _ => false,
    }
}

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
fn is_available(isa: Isa) -> bool {
    match isa {
        Isa::Scalar | Isa::Neon => true,
        Isa::NeonDotprod => isa_features!(NeonDotprod, has_features),
        _ => false,
    }
}

#[cfg(target_family = "wasm")]
fn is_available(isa: Isa) -> bool {
    match isa {
        Isa::Scalar => HAS_SCALAR,
        Isa::Simd128 => cfg!(target_feature = "simd128"),
        // some engines compile the relaxed dot product wrongly, so it is probed first
        #[cfg(target_feature = "relaxed-simd")]
        Isa::RelaxedI16 | Isa::RelaxedSimd => {
            super::isa::wasm::probe::relaxed_is_exact([Isa::RelaxedI16, Isa::RelaxedSimd].map(Cpu::of))
        }
        _ => false,
    }
}

#[cfg(not(any(
    target_arch = "x86_64",
    all(target_arch = "aarch64", target_endian = "little"),
    target_family = "wasm"
)))]
fn is_available(isa: Isa) -> bool {
    isa == Isa::Scalar
}
