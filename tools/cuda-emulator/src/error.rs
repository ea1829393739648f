use std::path::PathBuf;

/// Error of a build of the emulator.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmulatorError {
    /// A file or folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file or folder could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The folder has no kernels.
    #[error("{}: expected .cu files, found none", path.display())]
    NoKernels {
        /// The folder.
        path: PathBuf,
    },
    /// The compiler could not be started.
    #[error("cannot start the C++ compiler `{compiler}`: {source}; install one or name it in CXX")]
    NoCompiler {
        /// The compiler's command.
        compiler: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The compiler refused a source.
    #[error("`{compiler}` failed on {}:\n{output}", path.display())]
    Compile {
        /// The compiler's command.
        compiler: String,
        /// The source, or the library when linking.
        path: PathBuf,
        /// The compiler's output.
        output: String,
    },
}
