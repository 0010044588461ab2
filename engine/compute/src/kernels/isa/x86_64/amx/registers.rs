//! AMX tile registers: permission, tile shapes, and dots.
#![allow(unsafe_code)]

use core::arch::asm;

use super::{CacheLine, Dots};

/// Asks Linux for the permission to use AMX; a process must request it, as the register state is large.
pub(in crate::kernels) fn is_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_PRCTL: isize = 158;
        const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
        const XFEATURE_XTILEDATA: usize = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: arch_prctl(2) with this request touches no memory of the process; the kernel keeps all registers but
        // those named.
        unsafe {
            asm!("syscall", inout("rax") result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XFEATURE_XTILEDATA,
                out("rcx") _, out("r11") _, options(nostack, nomem));
        }
        result == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Tile configuration (64 bytes, palette 1).
#[repr(C, align(64))]
pub(super) struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    const fn new(row_bytes: [u16; 8], rows: [u8; 8]) -> TileConfig {
        let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut i = 0;
        while i < 8 {
            (config.row_bytes[i], config.rows[i]) = (row_bytes[i], rows[i]);
            i += 1;
        }
        config
    }

    /// For blocks of 32: tmm4 holds 16 columns, tmm5 a block of a panel.
    pub(super) const BLOCK32: TileConfig =
        TileConfig::new([64, 64, 64, 64, 32, 64, 64, 64], [16, 16, 16, 16, 16, 8, 16, 16]);
    /// For super-blocks, 64 elements at a time.
    pub(super) const SUPER_BLOCK: TileConfig = TileConfig::new([64; 8], [16; 8]);

    /// Loads the tile configuration.
    ///
    /// # Safety
    /// The CPU has AMX, and this process may use it.
    #[inline(always)]
    pub(super) unsafe fn load(&self) {
        // SAFETY: the contract of this function, which its caller keeps; 64 bytes, valid shapes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly, preserves_flags)) }
    }
}

/// Releases the tile registers.
///
/// # Safety
/// As [`TileConfig::load`]; no dots may be pending.
#[inline(always)]
pub(super) unsafe fn release() {
    // SAFETY: the contract of this function, which its caller keeps.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}

/// Computes the dots of a block of 32: `columns` points at 16 rows of 32 bytes, `groups` at 8 lines of weights. The
/// dots stay in a tile register of even or of odd blocks.
///
/// # Safety
/// Both inputs must be readable, and the configuration `BLOCK32` loaded.
#[inline(always)]
pub(super) unsafe fn start_32<const ODD: bool>(columns: *const u32, groups: *const CacheLine) {
    macro_rules! start {
        ($dots:literal) => {
            // SAFETY: the contract of this function, which its caller keeps; the compiler does not use AMX registers.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{columns} + {half}]",
                    "tileloadd tmm5, [{groups} + {line}]",
                    concat!("tilezero ", $dots),
                    concat!("tdpbssd ", $dots, ", tmm4, tmm5"),
                    columns = in(reg) columns,
                    groups = in(reg) groups,
                    half = in(reg) 32usize,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags, readonly),
                )
            }
        };
    }
    if ODD { start!("tmm2") } else { start!("tmm0") }
}

/// Stores the dots of [`start_32`].
///
/// # Safety
/// `start_32` must have been called for this parity.
#[inline(always)]
pub(super) unsafe fn finish_32<const ODD: bool>(dots: &mut Dots) {
    macro_rules! finish {
        ($dots:literal) => {
            // SAFETY: the contract of this function, which its caller keeps; 16 rows of 64 bytes.
            unsafe {
                asm!(
                    concat!("tilestored [{dots} + {line}], ", $dots),
                    dots = in(reg) dots,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags),
                )
            }
        };
    }
    if ODD { finish!("tmm2") } else { finish!("tmm0") }
}

/// Computes the dots of a super-block: `columns` points at 4 times 16 rows of 64 bytes, `groups` at 64 lines of low
/// bytes and 64 of high bytes.
///
/// # Safety
/// Both inputs must be readable, and the configuration `SUPER_BLOCK` loaded.
#[inline(always)]
pub(super) unsafe fn start_256<const ODD: bool>(columns: *const u32, groups: *const CacheLine) {
    macro_rules! start {
        ($low:literal, $high:literal) => {
            // SAFETY: the caller vouches for both inputs and the configuration; no memory is written.
            unsafe {
                asm!(
                    concat!("tilezero ", $low),
                    concat!("tilezero ", $high),
                    "tileloadd tmm4, [{columns} + {line}]",
                    "tileloadd tmm6, [{groups} + {line}]",
                    concat!("tdpbssd ", $low, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 4096]",
                    concat!("tdpbssd ", $high, ", tmm4, tmm7"),
                    "tileloadd tmm5, [{columns} + {line} + 1024]",
                    "tileloadd tmm6, [{groups} + {line} + 1024]",
                    concat!("tdpbssd ", $low, ", tmm5, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 5120]",
                    concat!("tdpbssd ", $high, ", tmm5, tmm7"),
                    "tileloadd tmm4, [{columns} + {line} + 2048]",
                    "tileloadd tmm6, [{groups} + {line} + 2048]",
                    concat!("tdpbssd ", $low, ", tmm4, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 6144]",
                    concat!("tdpbssd ", $high, ", tmm4, tmm7"),
                    "tileloadd tmm5, [{columns} + {line} + 3072]",
                    "tileloadd tmm6, [{groups} + {line} + 3072]",
                    concat!("tdpbssd ", $low, ", tmm5, tmm6"),
                    "tileloadd tmm7, [{groups} + {line} + 7168]",
                    concat!("tdpbssd ", $high, ", tmm5, tmm7"),
                    columns = in(reg) columns,
                    groups = in(reg) groups,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags, readonly),
                )
            }
        };
    }
    if ODD { start!("tmm2", "tmm3") } else { start!("tmm0", "tmm1") }
}

/// Stores the dots of [`start_256`].
///
/// # Safety
/// `start_256` must have been called for this parity.
#[inline(always)]
pub(super) unsafe fn finish_256<const ODD: bool>(dots: &mut Dots) {
    macro_rules! finish {
        ($low:literal, $high:literal) => {
            // SAFETY: the contract of this function, which its caller keeps; twice 16 rows of 64 bytes.
            unsafe {
                asm!(
                    concat!("tilestored [{dots} + {line}], ", $low),
                    concat!("tilestored [{dots} + {line} + 1024], ", $high),
                    dots = in(reg) dots,
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags),
                )
            }
        };
    }
    if ODD { finish!("tmm2", "tmm3") } else { finish!("tmm0", "tmm1") }
}
