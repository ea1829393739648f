//! PTX run instruction by instruction: programs of a few lines, written for one instruction or one
//! fault each.

#[path = "ptx/faults.rs"]
mod faults;
#[path = "ptx/floats.rs"]
mod floats;
#[path = "ptx/integers.rs"]
mod integers;
#[path = "ptx/together.rs"]
mod together;

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::plain;

/// What stands before a program: registers of every type, `%rd0` the memory, `%r0` the thread and
/// `%rd1` the address of the thread's own word.
const HEAD: &str = "\
.version 8.4
.target sm_70
.address_size 64
.shared .align 8 .b8 outside[16];
.visible .entry probe(
	.param .align 8 .b8 probe_param_0[16]
)
.maxntid 1024, 1, 1
{
	.reg .pred %p<8>;
	.reg .b16 %h<8>;
	.reg .b32 %r<32>;
	.reg .b64 %rd<32>;
	.reg .f32 %f<8>;
	.reg .f64 %d<8>;
	.shared .align 8 .b8 shared[8192];
	ld.param.u64 %rd0, [probe_param_0];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %rd1, %r0, 8;
	add.s64 %rd1, %rd0, %rd1;
";

/// The line of a program's first line in its module.
const FIRST_LINE: usize = 21;

/// How a program is launched.
#[derive(Clone, Copy)]
struct Launch<'a> {
    grid: u32,
    block: u32,
    environment: &'a [(&'a str, &'a str)],
}

impl Launch<'_> {
    /// One block of so many threads.
    fn of(block: u32) -> Self {
        Self { grid: 1, block, environment: &[] }
    }
}

/// What a program has left behind.
struct Ran {
    /// The call that failed and its code, if one did.
    failed: Option<String>,
    words: Vec<u64>,
    errors: String,
}

/// Runs a program on memory.
fn run(body: &str, launch: Launch, memory: &[u64]) -> Ran {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let probe = plain();
    let path = probe.libraries.join(format!("program-{number}.ptx"));
    std::fs::write(&path, format!("{HEAD}{body}\n\tret;\n}}\n")).expect("writable");
    let mut command = Command::new(&probe.ptx_program);
    command.arg(&path);
    command.args([launch.grid.to_string(), launch.block.to_string()]);
    command.env("LD_LIBRARY_PATH", &probe.libraries);
    command.env("FUSESTEP_EMULATOR_CODE", "ptx");
    command.envs(launch.environment.iter().copied());
    command.stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let mut input = String::new();
    for word in memory {
        writeln!(input, "{word:x}").expect("a string takes all");
    }
    let mut standard_input = child.stdin.take().expect("piped");
    standard_input.write_all(input.as_bytes()).expect("read");
    drop(standard_input);
    let output = child.wait_with_output().expect("the program ends");
    let printed = String::from_utf8(output.stdout).expect("text");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        return Ran { failed: Some(printed.trim().to_owned()), words: vec![], errors };
    }
    let words = printed.lines().map(|line| u64::from_str_radix(line, 16));
    Ran { failed: None, words: words.map(|word| word.expect("a number")).collect(), errors }
}

/// What a program that must not fail makes of the memory.
fn words(body: &str, launch: Launch, memory: &[u64]) -> Vec<u64> {
    let ran = run(body, launch, memory);
    assert!(ran.failed.is_none(), "{:?}: {}", ran.failed, ran.errors);
    assert_eq!(ran.errors, "");
    ran.words
}

/// A program that must fail with this code; what was said about it.
fn complaint(body: &str, launch: Launch, memory: &[u64], code: u32) -> String {
    let ran = run(body, launch, memory);
    let failed = ran.failed.expect("the program fails");
    assert!(
        failed.ends_with(&format!(" {code}")),
        "expected {code}, found {failed}: {}",
        ran.errors
    );
    ran.errors
}

/// The result of an instruction for each of the cases, bits as words; `types` are those of the
/// result and the sources.
fn results(opcode: &str, types: &[&str], cases: &[[u64; 3]]) -> Vec<u64> {
    let mut body = String::from("\tmul.wide.u32 %rd2, %r0, 32;\n\tadd.s64 %rd1, %rd0, %rd2;\n");
    let mut operands = vec![register(types[0], 0)];
    for (index, of_type) in types[1..].iter().enumerate() {
        let name = register(of_type, index + 1);
        let at = 8 * index;
        if *of_type == "pred" {
            writeln!(body, "\tld.global.u32 %r31, [%rd1+{at}];").unwrap();
            writeln!(body, "\tsetp.ne.s32 {name}, %r31, 0;").unwrap();
        } else {
            writeln!(body, "\tld.global.{of_type} {name}, [%rd1+{at}];").unwrap();
        }
        operands.push(name);
    }
    writeln!(body, "\t{opcode} {};", operands.join(", ")).unwrap();
    if types[0] == "pred" {
        body += "\tselp.u32 %r31, 1, 0, %p0;\n\tst.global.u32 [%rd1+24], %r31;\n";
    } else {
        writeln!(body, "\tst.global.{} [%rd1+24], {};", types[0], operands[0]).unwrap();
    }
    let memory: Vec<u64> = cases.iter().flat_map(|&[a, b, c]| [a, b, c, 0]).collect();
    let after = words(&body, Launch::of(cases.len() as u32), &memory);
    after.chunks(4).map(|case| case[3]).collect()
}

/// A register that holds the type.
fn register(of_type: &str, index: usize) -> String {
    let kind = match of_type {
        "pred" => "p",
        "f32" => "f",
        "f64" => "d",
        "b16" | "u16" | "s16" => "h",
        "b32" | "u32" | "s32" => "r",
        _ => "rd",
    };
    // Registers 0 and 1 of two types hold the thread and its address.
    let index = if kind == "r" || kind == "rd" { index + 8 } else { index };
    format!("%{kind}{index}")
}

/// [`results`] of one case.
fn result(opcode: &str, types: &[&str], case: [u64; 3]) -> u64 {
    results(opcode, types, &[case])[0]
}

#[test]
fn what_cannot_be_assembled_is_refused_with_its_line() {
    let says = |body: &str, expected: &str| {
        let text = complaint(body, Launch::of(1), &[0], 218);
        assert!(
            text.contains(&format!("PTX line {FIRST_LINE}: ")) && text.contains(expected),
            "{body}: {text}"
        );
    };
    says("\tadd.q32 %r1, %r2, %r3;", "unknown instruction `add.q32`");
    // Their bits are left to the device.
    says("\tdiv.approx.f32 %f1, %f2, %f3;", "unknown instruction");
    // The assembler may contract it.
    says("\tadd.f32 %f1, %f2, %f3;", "unknown instruction `add.f32`");
    says("\tmov.u32 %r1, %what;", "unknown operand `%what`");
    says("\tmov.u32 7, %r1;", "expected a register, found `7`");
    says("\tadd.s32 %r1, %r2;", "expected 3 operands, found 2");
    says("\tbra NOWHERE;", "no label NOWHERE");
    says("\tbar.sync 1;", "expected barrier 0 of all threads");
    says("\tshl.b32 %rd1, %rd2, 2;", "expected a register of 4 bytes, found a register of 8 bytes");
    says("\tcvt.u64.u32 %r1, %r2;", "expected a register of 8 bytes");
    says("\tselp.b32 %r1, %r2, %r3, %r4;", "expected a predicate");
    says("\t@%r1 ret;", "expected a predicate, found a register");
    says("\tld.global.u64 %r1, [%rd1];", "expected a register of 8");
    says("\tld.global.u32 %r1, [%r2];", "expected a register of 8 b");
    says("\tld.global.v4.f64 {%d0, %d1, %d2, %d3}, [%rd1];", "unknown");
    says("\tld.global.v2.f32 {%f0}, [%rd1];", "expected 2 elements");
}
