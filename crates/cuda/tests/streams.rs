//! Time on a stream, and work on streams and memory of a framework of which the backend knows
//! nothing.

#[path = "streams/adopted.rs"]
mod adopted;
#[path = "streams/borrowed.rs"]
mod borrowed;
mod common;
#[path = "streams/framework.rs"]
mod framework;
#[path = "streams/timing.rs"]
mod timing;
