//! candle without fusestep: its features are compared with those beside it; nothing is built.
#![forbid(unsafe_code)]

fn main() {}
