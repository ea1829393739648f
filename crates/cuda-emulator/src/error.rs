use std::path::PathBuf;

/// Why the emulator could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmulatorError {
    /// A file or folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file or folder could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The folder has no kernels.
    #[error("{}: expected .cu files, found none", path.display())]
    NoKernels {
        /// The folder.
        path: PathBuf,
    },
    /// A kernel's entry is written in another form than the emulator can read.
    #[error(
        "{}:{line}: expected `extern \"C\" __global__ void __launch_bounds__(N) NAME(const __grid_constant__ TYPE arguments)` on one line, found `{found}`",
        path.display()
    )]
    EntryForm {
        /// The source file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The line's text.
        found: String,
    },
    /// The compiler could not be started.
    #[error("cannot start the C++ compiler `{compiler}`: {source}; install one or name it in CXX")]
    NoCompiler {
        /// The compiler's command.
        compiler: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The compiler refused a source.
    #[error("`{compiler}` failed on {}:\n{output}", path.display())]
    Compile {
        /// The compiler's command.
        compiler: String,
        /// The source, or the library when linking.
        path: PathBuf,
        /// What the compiler printed.
        output: String,
    },
}
