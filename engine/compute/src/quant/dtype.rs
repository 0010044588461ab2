//! [`Dtype`]: the element types of ggml.

/// An element type of ggml. Source: `enum ggml_type` and the type table of
/// <https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml.c>.
///
/// Types are stored in blocks of a fixed number of elements and bytes; a row is a whole number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)] // ggml's own names
pub enum Dtype {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

use Dtype::*;

/// Type, ggml id, name, elements per block, bytes per block; in order of the enum.
const TABLE: [(Dtype, u32, &str, u64, u64); 35] = [
    (F32, 0, "F32", 1, 4),
    (F16, 1, "F16", 1, 2),
    (Q4_0, 2, "Q4_0", 32, 18),
    (Q4_1, 3, "Q4_1", 32, 20),
    (Q5_0, 6, "Q5_0", 32, 22),
    (Q5_1, 7, "Q5_1", 32, 24),
    (Q8_0, 8, "Q8_0", 32, 34),
    (Q8_1, 9, "Q8_1", 32, 36),
    (Q2_K, 10, "Q2_K", 256, 84),
    (Q3_K, 11, "Q3_K", 256, 110),
    (Q4_K, 12, "Q4_K", 256, 144),
    (Q5_K, 13, "Q5_K", 256, 176),
    (Q6_K, 14, "Q6_K", 256, 210),
    (Q8_K, 15, "Q8_K", 256, 292),
    (IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    (IQ2_XS, 17, "IQ2_XS", 256, 74),
    (IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    (IQ1_S, 19, "IQ1_S", 256, 50),
    (IQ4_NL, 20, "IQ4_NL", 32, 18),
    (IQ3_S, 21, "IQ3_S", 256, 110),
    (IQ2_S, 22, "IQ2_S", 256, 82),
    (IQ4_XS, 23, "IQ4_XS", 256, 136),
    (I8, 24, "I8", 1, 1),
    (I16, 25, "I16", 1, 2),
    (I32, 26, "I32", 1, 4),
    (I64, 27, "I64", 1, 8),
    (F64, 28, "F64", 1, 8),
    (IQ1_M, 29, "IQ1_M", 256, 56),
    (BF16, 30, "BF16", 1, 2),
    (TQ1_0, 34, "TQ1_0", 256, 54),
    (TQ2_0, 35, "TQ2_0", 256, 66),
    (MXFP4, 39, "MXFP4", 32, 17),
    (NVFP4, 40, "NVFP4", 64, 36),
    (Q1_0, 41, "Q1_0", 128, 18),
    (Q2_0, 42, "Q2_0", 64, 18),
];

impl Dtype {
    /// Every type, in order of ids.
    pub fn all() -> impl Iterator<Item = Dtype> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type with this id; `None` if ggml has none, or removed it.
    pub fn from_ggml(id: u32) -> Option<Dtype> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// The type with this name, exactly as [`Dtype::name`] spells it.
    pub fn from_name(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|row| row.2 == name).map(|row| row.0)
    }

    /// The name of a type that ggml removed.
    pub fn removed_name(id: u32) -> Option<&'static str> {
        Some(match id {
            4 => "Q4_2",
            5 => "Q4_3",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            _ => return None,
        })
    }

    /// The id in GGUF files.
    pub const fn ggml_id(self) -> u32 {
        TABLE[self as usize].1
    }

    /// The name that ggml uses.
    pub const fn name(self) -> &'static str {
        TABLE[self as usize].2
    }

    /// Elements of a block.
    pub const fn block_len(self) -> u64 {
        TABLE[self as usize].3
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> u64 {
        TABLE[self as usize].4
    }

    /// Bytes of a row of `k` elements; `None` if that is not a whole number of blocks, or more than `u64`.
    pub fn row_bytes(self, k: u64) -> Option<u64> {
        if !k.is_multiple_of(self.block_len()) {
            return None;
        }
        (k / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether this engine computes with the type.
    pub fn supported(self) -> bool {
        Dtype::SUPPORTED.contains(&self)
    }

    /// The types this engine computes with.
    #[rustfmt::skip]
    pub const SUPPORTED: [Dtype; 28] = [
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS,
        IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0, Q2_0,
    ];

    /// Byte offsets of the f16 scales in a block; empty for types without f16 scales, or whose scale is split (IQ1_M).
    pub const fn f16_scales(self) -> &'static [usize] {
        match self {
            F16 | Q4_0 | Q5_0 | Q8_0 | IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_NL | IQ4_XS | Q1_0
            | Q2_0 => &[0],
            Q4_1 | Q5_1 | Q4_K | Q5_K => &[0, 2],
            Q2_K => &[80, 82],
            Q3_K => &[108],
            Q6_K => &[208],
            TQ1_0 => &[52],
            TQ2_0 => &[64],
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_order_of_the_enum() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i);
            assert_eq!(Dtype::from_ggml(row.1), Some(row.0));
            assert_eq!(Dtype::from_name(row.2), Some(row.0));
            assert_eq!(std::format!("{:?}", row.0), row.2);
        }
    }

    #[test]
    fn row_bytes_needs_whole_blocks() {
        assert_eq!(Q4_0.row_bytes(64), Some(36));
        assert_eq!(Q4_0.row_bytes(65), None);
        assert_eq!(F64.row_bytes(u64::MAX), None);
    }
}
