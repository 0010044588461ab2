//! Format of a page file. Integers are little-endian.
//!
//! | bytes    | field                                                                  |
//! |----------|------------------------------------------------------------------------|
//! | 0..8     | magic                                                                  |
//! | 8..12    | format version                                                         |
//! | 12..16   | checksum type: 1 CRC-32C, 2 keyed BLAKE3                               |
//! | 16..20   | numerics version                                                       |
//! | 20..24   | token count                                                            |
//! | 24..32   | payload length                                                         |
//! | 32..64   | namespace                                                              |
//! | 64..96   | page key                                                               |
//! | 96..128  | checksum of the header, computed with zeros here                       |
//! | 128..    | checksum of each payload block, 16 bytes each; then zeros up to 4096   |
//! | 4096..   | payload                                                                |

use super::{Namespace, PageInfo, PageKey};

/// One block of most file systems, so that a payload of whole blocks costs one more.
pub const HEADER_LEN: usize = 4096;
const BLOCK_LEN: usize = 64 * 1024;
const BLOCKS_AT: usize = 128;
const BLOCK_SUM_LEN: usize = 16;
/// Largest payload: the header has room for the checksums of 248 blocks.
pub const MAX_PAGE: usize = (HEADER_LEN - BLOCKS_AT) / BLOCK_SUM_LEN * BLOCK_LEN;

const MAGIC: [u8; 8] = *b"STRLNGKV";
const VERSION: u32 = 1;
const HEADER_SUM: std::ops::Range<usize> = 96..128;

/// Why a file was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// A link, directory, FIFO, socket or device.
    FileType,
    /// The file belongs to another user.
    Owner,
    /// The size contradicts the header, or exceeds `Options::max_page`.
    Size,
    /// Magic, format version or checksum type.
    Format,
    HeaderChecksum,
    NumericsVersion,
    /// The namespace or key is not the requested one.
    Identity,
    BlockChecksum,
}

impl Refusal {
    pub const ALL: [Refusal; 8] = [
        Refusal::FileType,
        Refusal::Owner,
        Refusal::Size,
        Refusal::Format,
        Refusal::HeaderChecksum,
        Refusal::NumericsVersion,
        Refusal::Identity,
        Refusal::BlockChecksum,
    ];

    /// Label of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Refusal::FileType => "file_type",
            Refusal::Owner => "owner",
            Refusal::Size => "size",
            Refusal::Format => "format",
            Refusal::HeaderChecksum => "header_checksum",
            Refusal::NumericsVersion => "numerics_version",
            Refusal::Identity => "identity",
            Refusal::BlockChecksum => "block_checksum",
        }
    }
}

/// Checksum of headers and blocks.
pub(super) enum Checksum {
    /// Detects faults of the disk. A writer of the directory can forge it.
    Crc32c,
    /// BLAKE3 with keys derived from `Options::key`. Blocks have the first 128 bits.
    Keyed { header_key: [u8; 32], block_key: [u8; 32] },
}

impl Checksum {
    pub(super) fn new(key: Option<&[u8; 32]>) -> Checksum {
        match key {
            None => Checksum::Crc32c,
            Some(key) => Checksum::Keyed {
                header_key: blake3::derive_key("starling 2026-11-27 kv_disk page header", key),
                block_key: blake3::derive_key("starling 2026-11-27 kv_disk page block", key),
            },
        }
    }

    fn code(&self) -> u32 {
        match self {
            Checksum::Crc32c => 1,
            Checksum::Keyed { .. } => 2,
        }
    }

    fn of_header(&self, header: &[u8]) -> blake3::Hash {
        match self {
            Checksum::Crc32c => {
                let mut sum = [0; 32];
                sum[..4].copy_from_slice(&crc_fast::crc32_iscsi(header).to_le_bytes());
                blake3::Hash::from_bytes(sum)
            }
            Checksum::Keyed { header_key, .. } => blake3::keyed_hash(header_key, header),
        }
    }

    fn of_block(&self, block: &[u8]) -> [u8; BLOCK_SUM_LEN] {
        let mut sum = [0; BLOCK_SUM_LEN];
        match self {
            Checksum::Crc32c => sum[..4].copy_from_slice(&crc_fast::crc32_iscsi(block).to_le_bytes()),
            Checksum::Keyed { block_key, .. } => {
                sum.copy_from_slice(&blake3::keyed_hash(block_key, block).as_bytes()[..BLOCK_SUM_LEN]);
            }
        }
        sum
    }
}

/// Writes and verifies headers.
pub(super) struct PageFormat {
    pub(super) checksum: Checksum,
    pub(super) numerics_version: u32,
    /// Maximum length of a payload in bytes.
    pub(super) max_page: usize,
}

/// A verified header: the checksums of the payload's blocks.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) payload_len: usize,
    block_sums: Vec<u8>,
}

impl PageFormat {
    /// Header of a payload of 1 to `MAX_PAGE` bytes.
    pub(super) fn encode(&self, key: &PageKey, info: &PageInfo, payload: &[u8]) -> Vec<u8> {
        let mut header = Vec::with_capacity(HEADER_LEN);
        header.extend(MAGIC);
        for field in [VERSION, self.checksum.code(), self.numerics_version, info.n_tokens] {
            header.extend(field.to_le_bytes());
        }
        header.extend((payload.len() as u64).to_le_bytes());
        header.extend(info.namespace.0);
        header.extend(key.0);
        header.extend([0; 32]);
        for block in payload.chunks(BLOCK_LEN) {
            header.extend(self.checksum.of_block(block));
        }
        header.resize(HEADER_LEN, 0);
        let sum = self.checksum.of_header(&header);
        header[HEADER_SUM].copy_from_slice(sum.as_bytes());
        header
    }

    /// Whether a file of this size can be a page.
    pub(super) fn is_page_size(&self, file_len: u64) -> bool {
        file_len.checked_sub(HEADER_LEN as u64).is_some_and(|len| len > 0 && len <= self.max_page as u64)
    }

    /// Verifies the header of a file of `file_len` bytes.
    ///
    /// # Errors
    /// The first check that fails.
    pub(super) fn decode(
        &self,
        header: &[u8],
        file_len: u64,
        key: &PageKey,
        namespace: &Namespace,
    ) -> Result<Header, Refusal> {
        if !self.is_page_size(file_len) || header.len() != HEADER_LEN {
            return Err(Refusal::Size);
        }
        let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if header[..8] != MAGIC || number(8) != VERSION || number(12) != self.checksum.code() {
            return Err(Refusal::Format);
        }
        let mut zeroed = header.to_vec();
        zeroed[HEADER_SUM].fill(0);
        let mut sum = [0; 32];
        sum.copy_from_slice(&header[HEADER_SUM]);
        // compares in constant time
        if self.checksum.of_header(&zeroed) != blake3::Hash::from_bytes(sum) {
            return Err(Refusal::HeaderChecksum);
        }
        if number(16) != self.numerics_version {
            return Err(Refusal::NumericsVersion);
        }
        if header[32..64] != namespace.0 || header[64..96] != key.0 {
            return Err(Refusal::Identity);
        }
        let payload_len = u64::from(number(24)) | u64::from(number(28)) << 32;
        if payload_len != file_len - HEADER_LEN as u64 {
            return Err(Refusal::Size);
        }
        let payload_len = usize::try_from(payload_len).map_err(|_| Refusal::Size)?;
        let sums_end = BLOCKS_AT + payload_len.div_ceil(BLOCK_LEN) * BLOCK_SUM_LEN;
        let block_sums = header.get(BLOCKS_AT..sums_end).ok_or(Refusal::Size)?.to_vec();
        Ok(Header { payload_len, block_sums })
    }

    /// Verifies the payload of a verified header.
    ///
    /// # Errors
    /// If the length or a checksum differs.
    pub(super) fn verify(&self, header: &Header, payload: &[u8]) -> Result<(), Refusal> {
        if payload.len() != header.payload_len {
            return Err(Refusal::Size);
        }
        let mut blocks = payload.chunks(BLOCK_LEN).zip(header.block_sums.chunks_exact(BLOCK_SUM_LEN));
        let is_intact = blocks.all(|(block, sum)| self.checksum.of_block(block) == sum);
        if is_intact { Ok(()) } else { Err(Refusal::BlockChecksum) }
    }
}
