//! AMX-INT8: the matrix unit of x86-64. `tdpbsud` adds exact integer products of a tile of activations (columns x 32
//! bytes) and one of weights (8 lines of a panel, which is the layout the unit wants) to 16 dots for each column.
//!
//! Written in assembly, as Rust has no stable intrinsics for it. Tiles 0, 1 and 2 hold dots, activations and weights; 3
//! and 4 dots and activations of the columns that do not fill a tile.

use core::arch::asm;
#[cfg(all(feature = "std", target_os = "linux"))]
use {core::arch::x86_64::__cpuid_count, std::sync::OnceLock};

use super::simd::MATRIX_COLUMNS;

/// Whether the CPU has the unit and the system lets this process use it; asks for it on the first call.
#[cfg(all(feature = "std", target_os = "linux"))]
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
        const XFEATURE_XTILEDATA: u64 = 18;
        const TILE_AND_INT8: u32 = 3 << 24;
        if __cpuid_count(7, 0).edx & TILE_AND_INT8 != TILE_AND_INT8 {
            return false;
        }
        let result: i64;
        // SAFETY: a system call that grants a permission and touches no memory; kernels without it return an error.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    })
}

/// Permission is asked for on Linux only.
#[cfg(not(all(feature = "std", target_os = "linux")))]
pub(super) fn is_available() -> bool {
    false
}

/// The operand of `ldtilecfg`: palette 1, bytes of a row and rows of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Prepares this thread's unit.
///
/// # Safety
/// [`is_available`] said yes.
#[inline(always)]
pub(super) unsafe fn begin(rest: usize) {
    const COLUMNS: u8 = MATRIX_COLUMNS as u8;
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    // a tile without rows would not be valid
    let rest = (rest as u8).max(1);
    for (tile, (bytes, rows)) in [(64, COLUMNS), (32, COLUMNS), (64, 8), (64, rest), (32, rest)].into_iter().enumerate()
    {
        (config.row_bytes[tile], config.rows[tile]) = (bytes, rows);
    }
    // SAFETY: a valid configuration: at most 16 rows of at most 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) }
}

/// See `Simd::matrix_dots`.
///
/// # Safety
/// After [`begin`], in the same thread; memory as said there.
#[inline(always)]
pub(super) unsafe fn dots<const FULL: bool>(acts: *const u32, weights: *const u8, dots: *mut i32) {
    // SAFETY: rows of 32 bytes of activations and of 64 bytes of weights and dots, which the caller vouches for. The
    // compiler uses no tiles itself.
    unsafe {
        if FULL {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm1, [{acts} + {short}]",
                "tileloadd tmm2, [{weights} + {long}]",
                "tdpbsud tmm0, tmm1, tmm2",
                "tilestored [{dots} + {long}], tmm0",
                acts = in(reg) acts,
                weights = in(reg) weights,
                dots = in(reg) dots,
                short = in(reg) 32usize,
                long = in(reg) 64usize,
                options(nostack),
            );
        } else {
            asm!(
                "tilezero tmm3",
                "tileloadd tmm4, [{acts} + {short}]",
                "tileloadd tmm2, [{weights} + {long}]",
                "tdpbsud tmm3, tmm4, tmm2",
                "tilestored [{dots} + {long}], tmm3",
                acts = in(reg) acts,
                weights = in(reg) weights,
                dots = in(reg) dots,
                short = in(reg) 32usize,
                long = in(reg) 64usize,
                options(nostack),
            );
        }
    }
}

/// Gives the unit back: its state is no longer saved when threads switch.
///
/// # Safety
/// After [`begin`], in the same thread.
#[inline(always)]
pub(super) unsafe fn end() {
    // SAFETY: the unit is there.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}
