//! Two calls of POSIX that the standard library lacks.
//!
//! Crates that have them, as safe functions, turn on features of crates which candle shares. A
//! program that adds this one would build candle anew for two numbers.

use std::ffi::c_int;

// SAFETY: the signatures of POSIX, whose `pid_t` and `uid_t` have 32 bits on all systems that the
// standard library knows. Neither call takes or returns an address.
unsafe extern "C" {
    /// Number of the user whose rights this process has; the call cannot fail.
    pub(crate) safe fn geteuid() -> u32;

    /// Sends a signal to a process. Signal 0 is not sent, and only asks whether it could be.
    safe fn kill(process: c_int, signal: c_int) -> c_int;
}

/// Asks whether a process of this number could be sent a signal.
pub(crate) fn could_signal(process: i32) -> std::io::Result<()> {
    // A number below 1 would ask after a group of processes.
    if process < 1 {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    match kill(process, 0) {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
