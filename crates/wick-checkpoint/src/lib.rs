//! Weight files of other programs: what their bytes mean.
#![forbid(unsafe_code)]
