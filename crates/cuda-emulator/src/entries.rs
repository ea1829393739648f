//! Finds the kernels of a `.cu` file and makes host C++ of it.

use std::fmt::Write as _;
use std::path::Path;

use crate::EmulatorError;

const START: &str = "extern \"C\" __global__ void __launch_bounds__(";
const PARAMETER: &str = "const __grid_constant__ ";

/// A kernel entry as its line declares it; the texts are C++.
#[derive(Debug, PartialEq, Eq)]
struct Entry<'a> {
    name: &'a str,
    threads_max: &'a str,
    argument_type: &'a str,
    parameter: &'a str,
}

/// The host's version of a `.cu` file: line numbers stay, argument blocks are passed by reference,
/// and every entry is registered.
pub(crate) fn host_source(path: &Path, source: &str) -> Result<String, EmulatorError> {
    let mut out = format!("#line 1 {:?}\n", path.display().to_string());
    let mut registrations = String::new();
    for (index, line) in source.lines().enumerate() {
        let text = line.trim();
        if !text.contains("__global__") || text.starts_with("//") {
            out.push_str(line);
            out.push('\n');
            continue;
        }
        let entry = parse(text).ok_or_else(|| EmulatorError::EntryForm {
            path: path.to_owned(),
            line: index + 1,
            found: text.to_owned(),
        })?;
        let Entry {
            name,
            threads_max,
            argument_type,
            parameter,
        } = entry;
        let by_value = format!("{PARAMETER}{argument_type} {parameter}");
        let by_reference = format!("{PARAMETER}{argument_type}& {parameter}");
        out.push_str(&line.replace(&by_value, &by_reference));
        out.push('\n');
        let _ = writeln!(
            registrations,
            "static const emulator::Registration register_{name}({{\"{name}\", sizeof({argument_type}), {threads_max}, \
             [](const void* arguments) {{ {name}(*static_cast<const {argument_type}*>(arguments)); }}}});"
        );
    }
    out.push_str("#include \"machine.hpp\"\n");
    out.push_str(&registrations);
    Ok(out)
}

fn parse(line: &str) -> Option<Entry<'_>> {
    let (threads_max, rest) = line.strip_prefix(START)?.split_once(')')?;
    // Blocks for each multiprocessor may follow; they bound registers, which the host has not.
    let threads_max = threads_max.split(',').next()?;
    let (name, rest) = rest.trim_start().split_once('(')?;
    let (argument, _) = rest.strip_prefix(PARAMETER)?.split_once(')')?;
    let (argument_type, parameter) = argument.rsplit_once(' ')?;
    let is_name = |text: &str| !text.is_empty() && text.chars().all(is_name_character);
    (is_name(name) && is_name(parameter)).then_some(Entry {
        name,
        threads_max,
        argument_type,
        parameter,
    })
}

fn is_name_character(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "extern \"C\" __global__ void __launch_bounds__(512) scale_4k(const __grid_constant__ multi_tensor::Arguments<4096> arguments) {";

    #[test]
    fn an_entry_is_read_off_its_line() {
        let entry = parse(LINE).unwrap();
        assert_eq!(entry.name, "scale_4k");
        assert_eq!(entry.threads_max, "512");
        assert_eq!(entry.argument_type, "multi_tensor::Arguments<4096>");
        assert_eq!(entry.parameter, "arguments");
        let bounded = LINE.replace("(512)", "(512, 1)");
        assert_eq!(parse(&bounded).unwrap(), entry);
    }

    #[test]
    fn arguments_become_a_reference_and_lines_keep_their_numbers() {
        let source = format!("// __global__ in a comment\n{LINE} run(arguments); }}\n");
        let host = host_source(Path::new("scale.cu"), &source).unwrap();
        let lines: Vec<&str> = host.lines().collect();
        assert_eq!(lines[0], "#line 1 \"scale.cu\"");
        assert!(
            lines[2].contains(
                "(const __grid_constant__ multi_tensor::Arguments<4096>& arguments) { run"
            )
        );
        assert!(
            host.contains("{\"scale_4k\", sizeof(multi_tensor::Arguments<4096>), 512,"),
            "{host}"
        );
    }

    #[test]
    fn another_form_is_refused_with_its_line() {
        for bad in [
            "__global__ void scale(float* p) {",
            "extern \"C\" __global__ void __launch_bounds__(512) NAME(Arguments arguments)",
            "extern \"C\" __global__ void __launch_bounds__(512) CONCAT(a, b)(const __grid_constant__ T x)",
        ] {
            let error = host_source(Path::new("scale.cu"), &format!("\n{bad}\n")).unwrap_err();
            let text = error.to_string();
            assert!(
                text.starts_with("scale.cu:2: expected") && text.contains(bad),
                "{text}"
            );
        }
    }
}
