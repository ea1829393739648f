//! Compiles kernels and driver functions into one shared library.

use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::EmulatorError;

/// Files of this folder with their texts, so that libraries can be built from anywhere.
macro_rules! sources {
    ($($name:literal)*) => { &[$(($name, include_str!($name))),*] };
}
pub(crate) use sources;

/// Sources of the emulator itself.
const SOURCES: &[(&str, &str)] = sources! {
    "device_language.hpp" "driver_api.hpp" "driver.hpp" "fiber.hpp" "machine.hpp" "cubins.cpp"
    "driver_device.cpp" "driver_graph.cpp" "driver_launch.cpp" "driver_memory.cpp"
    "driver_streams.cpp" "execution.cpp" "fiber.cpp" "memory.cpp" "modules.cpp"
    "ptx_arithmetic.hpp" "ptx_machine.hpp" "ptx_program.hpp" "ptx_text.hpp"
    "ptx_conversions.cpp" "ptx_counts.cpp" "ptx_decode.cpp" "ptx_floats.cpp" "ptx_integers.cpp"
    "ptx_memory.cpp" "ptx_races.cpp" "ptx_run.cpp" "ptx_text.cpp"
};

/// Whether the library is compiled with sanitizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sanitize {
    /// No sanitizers: as fast as the emulator's checks allow.
    #[default]
    Off,
    /// `-fsanitize=address,undefined`: finds undefined arithmetic, and wrong accesses that do not
    /// go through the kernels' dialect. A program that loads this library must preload the
    /// compiler's `libasan.so`.
    AddressAndUndefined,
}

/// Options of a build of the emulator.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The C++17 compiler; by default the environment's `CXX`, else `c++`.
    pub compiler: Option<OsString>,
    /// Whether to compile with sanitizers; off by default.
    pub sanitize: Sanitize,
}

impl Options {
    /// The compiler that [`build`] runs.
    pub fn compiler(&self) -> OsString {
        let named = self.compiler.clone().or_else(|| std::env::var_os("CXX"));
        named.filter(|name| !name.is_empty()).unwrap_or_else(|| "c++".into())
    }

    pub(crate) fn flags(&self) -> Vec<&'static str> {
        let mut flags = vec![
            "-std=c++17",
            "-fPIC",
            "-pthread",
            // The numeric contract: every operation is rounded by itself.
            "-ffp-contract=off",
            // A checked jump refuses to change stacks, as fibers do.
            "-U_FORTIFY_SOURCE",
            "-Wall",
            "-Wextra",
            "-Wno-unknown-pragmas",
        ];
        match self.sanitize {
            Sanitize::Off => flags.push("-O2"),
            Sanitize::AddressAndUndefined => flags.extend([
                "-O1",
                "-g",
                "-fno-omit-frame-pointer",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=undefined",
            ]),
        }
        flags
    }
}

/// Builds the driver library with the kernels of `kernels_dir` and returns its path,
/// `out_dir/lib64/libcuda.so.1`.
///
/// `CUDA_LIBRARY_PATH=out_dir` links with the library, `LD_LIBRARY_PATH=out_dir/lib64` runs on it.
/// Nothing is compiled again while sources, compiler and options stay the same. Other kernels in
/// the same `out_dir` leave the emulator's own objects as they are. One build at a time may use an
/// `out_dir`.
///
/// # Errors
/// [`EmulatorError::Compile`] with the compiler's output, and the variants for files and a missing
/// compiler.
/// # Cost
/// A few seconds of compilation.
pub fn build(
    kernels_dir: &Path,
    out_dir: &Path,
    options: &Options,
) -> Result<PathBuf, EmulatorError> {
    let inputs = Inputs::read(kernels_dir)?;
    let build_dir = out_dir.join("build");
    let library_dir = out_dir.join("lib64");
    let library = library_dir.join("libcuda.so.1");
    let stamp = out_dir.join("stamp");
    let wanted = inputs.fingerprint(options);
    if is_of(&library, &stamp, &wanted) {
        return Ok(library);
    }
    for dir in [&build_dir, &library_dir] {
        fs::create_dir_all(dir).map_err(|source| write_error(dir, source))?;
    }
    // The stamp is gone until the library is complete, so that a build that fails leaves no old
    // stamp.
    let _ = fs::remove_file(&stamp);
    let objects = inputs.compile(kernels_dir, &build_dir, options)?;
    link(&objects, &library, &[], options)?;
    let unversioned = library_dir.join("libcuda.so");
    let _ = fs::remove_file(&unversioned);
    std::os::unix::fs::symlink("libcuda.so.1", &unversioned)
        .map_err(|source| write_error(&unversioned, source))?;
    write(&stamp, &wanted)?;
    Ok(library)
}

/// Sources of a build.
struct Inputs {
    /// Path and text of each `.cu` file, by name.
    kernels: Vec<(PathBuf, String)>,
    /// Texts of headers, which count for the fingerprint only.
    headers: Vec<String>,
}

impl Inputs {
    fn read(kernels_dir: &Path) -> Result<Self, EmulatorError> {
        let read_error =
            |path: &Path, source| EmulatorError::Read { path: path.to_owned(), source };
        let mut paths = Vec::new();
        let entries = fs::read_dir(kernels_dir).map_err(|error| read_error(kernels_dir, error))?;
        for entry in entries {
            paths.push(entry.map_err(|error| read_error(kernels_dir, error))?.path());
        }
        paths.sort();
        let mut inputs = Self { kernels: Vec::new(), headers: Vec::new() };
        for path in paths {
            let extension = path.extension().and_then(|extension| extension.to_str());
            if !matches!(extension, Some("cu" | "cuh")) {
                continue;
            }
            let text = fs::read_to_string(&path).map_err(|error| read_error(&path, error))?;
            if extension == Some("cu") {
                inputs.kernels.push((path, text));
            } else {
                inputs.headers.push(text);
            }
        }
        if inputs.kernels.is_empty() {
            return Err(EmulatorError::NoKernels { path: kernels_dir.to_owned() });
        }
        Ok(inputs)
    }

    /// A hash of everything on which the library depends, except the compiler's version.
    fn fingerprint(&self, options: &Options) -> String {
        hash(&(&self.kernels, &self.headers, SOURCES, options.compiler(), options.flags()))
    }

    fn compile(
        &self,
        kernels_dir: &Path,
        build_dir: &Path,
        options: &Options,
    ) -> Result<Vec<PathBuf>, EmulatorError> {
        let own_headers: Vec<_> = SOURCES.iter().filter(|(name, _)| is_header(name)).collect();
        let compiler = (options.compiler(), options.flags());
        for (name, text) in SOURCES {
            write(&build_dir.join(name), text)?;
        }
        let kernels = self.kernels.iter().map(|(path, text)| {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            Source {
                path: path.clone(),
                object: build_dir.join(format!("kernel_{name}.o")),
                wanted: hash(&(text, &self.headers, &own_headers, &compiler)),
            }
        });
        let own = SOURCES.iter().filter(|(name, _)| !is_header(name));
        let own = own.map(|(name, text)| Source {
            path: build_dir.join(name),
            object: build_dir.join(name).with_extension("o"),
            wanted: hash(&(text, &own_headers, &compiler)),
        });
        // Errors are usually in kernels, so the kernels are compiled first and their errors
        // reported at once.
        let mut objects = compile_all(kernels, [build_dir, kernels_dir], options)?;
        objects.extend(compile_all(own, [build_dir, kernels_dir], options)?);
        Ok(objects)
    }
}

/// A source, its object, and the stamp that says that the object is of this source.
struct Source {
    path: PathBuf,
    object: PathBuf,
    wanted: String,
}

/// Compiles, side by side, the sources whose objects are out of date, and returns the paths of all
/// objects.
fn compile_all(
    sources: impl Iterator<Item = Source>,
    include: [&Path; 2],
    options: &Options,
) -> Result<Vec<PathBuf>, EmulatorError> {
    let (mut started, mut objects) = (Vec::new(), Vec::new());
    for Source { path, object, wanted } in sources {
        let stamp = object.with_extension("stamp");
        objects.push(object.clone());
        if is_of(&object, &stamp, &wanted) {
            continue;
        }
        let _ = fs::remove_file(&stamp);
        let mut command = Command::new(options.compiler());
        command.args(options.flags());
        for folder in include {
            command.arg("-I").arg(folder);
        }
        command.args(["-x", "c++", "-c"]).arg(path);
        command.arg("-o").arg(&object);
        started.push((object, stamp, wanted, start(command, options)?));
    }
    // All compilers are waited for, also after one has failed: none may go on writing into the
    // folder.
    let results: Vec<_> = started
        .into_iter()
        .map(|(object, stamp, wanted, child)| {
            finish(child, &object, options)?;
            write(&stamp, &wanted)
        })
        .collect();
    results.into_iter().collect::<Result<Vec<()>, _>>()?;
    Ok(objects)
}

fn is_header(name: &str) -> bool {
    name.ends_with(".hpp")
}

/// Whether a file exists and its stamp says that it is made of the wanted sources.
pub(crate) fn is_of(file: &Path, stamp: &Path, wanted: &str) -> bool {
    file.exists() && fs::read_to_string(stamp).is_ok_and(|found| found == wanted)
}

pub(crate) fn hash(value: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Links objects or sources into a library, with additional flags.
pub(crate) fn link(
    parts: &[PathBuf],
    library: &Path,
    flags: &[&str],
    options: &Options,
) -> Result<(), EmulatorError> {
    let fresh = library.with_extension("new");
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    let mut command = Command::new(options.compiler());
    command.args(options.flags());
    command.arg("-shared").arg(format!("-Wl,-soname,{name}")).arg("-o");
    command.arg(&fresh).args(parts).args(flags);
    finish(start(command, options)?, library, options)?;
    // A rename does not disturb programs that run on the old library.
    fs::rename(&fresh, library).map_err(|source| write_error(library, source))
}

fn start(mut command: Command, options: &Options) -> Result<Child, EmulatorError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(
        |source| EmulatorError::NoCompiler {
            compiler: options.compiler().to_string_lossy().into_owned(),
            source,
        },
    )
}

fn finish(child: Child, path: &Path, options: &Options) -> Result<(), EmulatorError> {
    let output = child
        .wait_with_output()
        .map_err(|source| EmulatorError::Read { path: path.to_owned(), source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(EmulatorError::Compile {
        compiler: options.compiler().to_string_lossy().into_owned(),
        path: path.to_owned(),
        output: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

pub(crate) fn write(path: &Path, text: &str) -> Result<(), EmulatorError> {
    fs::write(path, text).map_err(|source| write_error(path, source))
}

pub(crate) fn write_error(path: &Path, source: std::io::Error) -> EmulatorError {
    EmulatorError::Write { path: path.to_owned(), source }
}
