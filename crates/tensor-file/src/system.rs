//! Calls to the operating system that differ between systems.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Opens a file without waiting, even if it turns out to be a pipe or a device.
pub(crate) fn open_at_once(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;

        use rustix::fs::OFlags;
        options.custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed());
    }
    options.open(path)
}

/// Opens a file without waiting, as [`open_at_once`] does; a link is refused.
pub(crate) fn open_itself(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;

        use rustix::fs::OFlags;
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
        options.custom_flags(flags.bits().cast_signed());
    }
    options.open(path)
}

/// The time at which a file's content last changed, in nanoseconds since 1970.
pub(crate) fn modified_ns(found: &Metadata) -> i64 {
    let since = found.modified().map(|at| match at.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |ns| -ns),
    });
    since.unwrap_or_default()
}

/// The time at which a file's content, names or permissions last changed, in nanoseconds since
/// 1970.
#[cfg(unix)]
pub(crate) fn touched_ns(found: &Metadata) -> i64 {
    use std::os::unix::fs::MetadataExt;
    found.ctime().saturating_mul(1_000_000_000).saturating_add(found.ctime_nsec())
}

#[cfg(not(unix))]
pub(crate) fn touched_ns(found: &Metadata) -> i64 {
    modified_ns(found)
}

/// The number by which the system knows a file.
#[cfg(unix)]
pub(crate) fn number(found: &Metadata) -> u64 {
    use std::os::unix::fs::MetadataExt;
    // The device's number tells files apart that have the same number on two devices.
    found.ino() ^ found.dev().rotate_left(32)
}

#[cfg(not(unix))]
pub(crate) fn number(_found: &Metadata) -> u64 {
    0
}

/// Whether this user or the superuser owns a file.
#[cfg(unix)]
pub(crate) fn is_trusted(found: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    found.uid() == 0 || found.uid() == crate::posix::geteuid()
}

#[cfg(not(unix))]
pub(crate) fn is_trusted(_found: &Metadata) -> bool {
    true
}

/// Whether an error says that a file system has no locks.
#[cfg(unix)]
pub(crate) fn has_no_locks(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let none = [Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOLCK];
    Errno::from_io_error(error).is_some_and(|errno| none.contains(&errno))
}

#[cfg(not(unix))]
pub(crate) fn has_no_locks(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
}

/// Whether a process exists, as far as the system tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Process {
    There,
    Gone,
    Unknown,
}

/// Whether a process of this machine has this number; processes of other users count, too.
#[cfg(unix)]
pub(crate) fn process(number: u32) -> Process {
    use rustix::io::Errno;
    let Ok(pid) = i32::try_from(number) else {
        return Process::Unknown;
    };
    match crate::posix::could_signal(pid) {
        Ok(()) => Process::There,
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::PERM) => Process::There,
            Some(Errno::SRCH) => Process::Gone,
            _ => Process::Unknown,
        },
    }
}

#[cfg(not(unix))]
pub(crate) fn process(_number: u32) -> Process {
    Process::Unknown
}
