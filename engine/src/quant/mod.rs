//! Quantised block formats.
