//! Weight formats: how a matrix is packed, the activations that multiply it, and the register tiles of its products.
//!
//! `panel` is a matrix in panels of 16 rows; `panel_layout` has the geometry of a panel, `pack` writes it and `decoded`
//! reads it. `bit_packing` and `i16_fields` are the two ways in which quants share bytes. `act` packs activations.
//! `tiles` has the register tiles, one file per family of formats.

pub mod act;
pub(super) mod bit_packing;
pub(super) mod decoded;
pub(super) mod i16_fields;
mod pack;
pub mod panel;
pub(super) mod panel_layout;
pub(super) mod tiles;
