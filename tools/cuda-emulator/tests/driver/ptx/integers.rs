//! Integers, bits, predicates and conversions between integers.

use super::{Launch, result, results, words};

fn each(opcode: &str, types: &[&str], cases: &[([u64; 3], u64)]) {
    let inputs: Vec<[u64; 3]> = cases.iter().map(|case| case.0).collect();
    let expected: Vec<u64> = cases.iter().map(|case| case.1).collect();
    let found = results(opcode, types, &inputs);
    assert_eq!(found, expected, "{opcode} of {inputs:x?}");
}

#[test]
fn shifts_beyond_the_width_are_shifts_by_the_width() {
    let by = |a: u64, b: u64, expected: u64| ([a, b, 0], expected);
    let all = u64::from(u32::MAX);
    each(
        "shl.b32",
        &["b32", "b32", "b32"],
        &[by(all, 31, 1 << 31), by(all, 32, 0), by(all, 33, 0), by(all, all, 0), by(5, 0, 5)],
    );
    each("shr.u32", &["u32", "u32", "b32"], &[by(all, 31, 1), by(all, 32, 0), by(all, 1 << 31, 0)]);
    each(
        "shr.s32",
        &["s32", "s32", "b32"],
        &[by(1 << 31, 4, 0xf800_0000), by(1 << 31, 99, all), by(all >> 1, 99, 0)],
    );
    let whole = u64::MAX;
    each(
        "shl.b64",
        &["b64", "b64", "b32"],
        &[by(whole, 63, 1 << 63), by(whole, 64, 0), by(3, 40, 3 << 40)],
    );
    each("shr.s64", &["s64", "s64", "b32"], &[by(1 << 63, 64, whole), by(1 << 63, 63, whole)]);
    each("shr.u16", &["u16", "u16", "b32"], &[by(0xffff, 15, 1), by(0xffff, 16, 0)]);
    each("shr.s16", &["s16", "s16", "b32"], &[by(0x8000, 16, 0xffff)]);
}

#[test]
fn sums_and_products_wrap_and_know_their_signs() {
    let of = |a: i64, b: i64, c: i64| [a as u64, b as u64, c as u64];
    let low = |value: i64| value as u64 & 0xffff_ffff;
    each("add.s32", &["s32"; 3], &[(of(i64::from(i32::MAX), 1, 0), 1 << 31)]);
    each("sub.s64", &["s64"; 3], &[(of(i64::MIN, 1, 0), i64::MAX as u64)]);
    each("mul.lo.s32", &["s32"; 3], &[(of(-3, 1 << 30, 0), low(-3 << 30))]);
    each("mul.wide.u32", &["u64", "u32", "u32"], &[(of(-1, -1, 0), 0xffff_fffe_0000_0001)]);
    each("mul.wide.s32", &["s64", "s32", "s32"], &[(of(-1, 5, 0), -5i64 as u64)]);
    each("mul.hi.u64", &["u64"; 3], &[(of(-1, 16, 0), 15)]);
    each("mad.lo.s32", &["s32"; 4], &[(of(7, -6, 2), low(-40))]);
    each("neg.s32", &["s32"; 2], &[(of(i64::from(i32::MIN), 0, 0), 1 << 31)]);
    each("max.u64", &["u64"; 3], &[(of(-1, 1, 0), u64::MAX)]);
    each("max.s64", &["s64"; 3], &[(of(-1, 1, 0), 1)]);
    each("min.s32", &["s32"; 3], &[(of(-1, 1, 0), low(-1))]);
    each("min.u16", &["u16"; 3], &[(of(0x8000, 3, 0), 3)]);
}

#[test]
fn comparisons_know_signs() {
    let pair = |a: u64, b: u64| [a, b, 0];
    let minus_one = u64::from(u32::MAX);
    each(
        "setp.lt.s32",
        &["pred", "s32", "s32"],
        &[(pair(minus_one, 0), 1), (pair(0, minus_one), 0), (pair(4, 4), 0)],
    );
    each("setp.lt.u32", &["pred", "u32", "u32"], &[(pair(minus_one, 0), 0), (pair(0, 1), 1)]);
    each("setp.ge.u64", &["pred", "u64", "u64"], &[(pair(1 << 63, 1), 1), (pair(1, 1), 1)]);
    each("setp.gt.s64", &["pred", "s64", "s64"], &[(pair(1 << 63, 1), 0)]);
    each("selp.b32", &["b32", "b32", "b32", "pred"], &[([5, 6, 1], 5), ([5, 6, 0], 6)]);
    each("xor.pred", &["pred"; 3], &[([1, 1, 0], 0), ([1, 0, 0], 1)]);
}

#[test]
fn fields_and_bytes_of_words() {
    // Source, position, length.
    let of = |a: u64, b: u64, c: u64| [a, b, c];
    each(
        "bfe.u32",
        &["u32", "u32", "b32", "b32"],
        &[(of(0xabcd_1234, 8, 8), 0x12), (of(0xabcd_1234, 28, 8), 0xa), (of(9, 40, 4), 0)],
    );
    each(
        "bfe.s32",
        &["s32", "s32", "b32", "b32"],
        &[
            (of(0xf0, 4, 4), 0xffff_ffff),
            (of(0x70, 4, 4), 7),
            (of(0x8000_0000, 28, 8), 0xffff_fff8),
        ],
    );
    // Bytes 0 to 3 are those of the first operand; a selector's eighth bit takes the sign.
    each(
        "prmt.b32",
        &["b32"; 4],
        &[
            (of(0x3322_1100, 0x7766_5544, 0x7531), 0x7755_3311),
            (of(0x0000_0080, 0, 0x8888), 0xffff_ffff),
        ],
    );
    let body =
        "\tbfi.b32 %r1, 255, 0, 28, 8;\n\tbfi.b32 %r2, 5, %r1, 4, 3;\n\tst.global.u32 [%rd1], %r2;";
    assert_eq!(words(body, Launch::of(1), &[0]), [0xf000_0050]);
}

#[test]
fn conversions_extend_by_the_source_and_cut_by_the_result() {
    assert_eq!(result("cvt.s32.s16", &["s32", "s16"], [0x8001, 0, 0]), 0xffff_8001);
    assert_eq!(result("cvt.u32.u16", &["u32", "u16"], [0x8001, 0, 0]), 0x8001);
    assert_eq!(result("cvt.u64.u32", &["u64", "u32"], [0x8000_0001, 0, 0]), 0x8000_0001);
    assert_eq!(result("cvt.s64.s32", &["s64", "s32"], [0x8000_0001, 0, 0]), 0xffff_ffff_8000_0001);
    assert_eq!(result("cvt.u32.u64", &["u32", "u64"], [0x1_0000_0007, 0, 0]), 7);
    // Of a source that is wider than the type, the low bytes count.
    assert_eq!(result("cvt.u32.u8", &["u32", "b32"], [0x1ff, 0, 0]), 0xff);
    assert_eq!(result("cvt.s32.s8", &["s32", "b32"], [0x180, 0, 0]), 0xffff_ff80);
}

#[test]
fn loads_extend_and_stores_cut() {
    let body = "\
	ld.global.s16 %r1, [%rd1];
	st.global.u32 [%rd1+8], %r1;
	ld.global.u8 %h1, [%rd1+1];
	st.global.u16 [%rd1+16], %h1;
	st.global.u8 [%rd1+24], %r1;
	ld.global.v2.u32 {%r2, %r3}, [%rd1+32];
	st.global.v4.u32 [%rd1+48], {%r3, %r2, %r1, 9};
	mov.b64 {%r4, %r5}, %rd0;
	mov.b64 %rd5, {%r4, %r5};
	sub.s64 %rd5, %rd5, %rd0;
	st.global.u64 [%rd1+40], %rd5;
";
    let memory = [0x1234_80ff, 0, 0, 0x5555, 0x2_0000_0001, 7, 0, 0];
    let found = words(body, Launch::of(1), &memory);
    assert_eq!(found[1..4], [0xffff_80ff, 0x80, 0x55ff]);
    assert_eq!(found[5..], [0, 0x1_0000_0002, 0x9_ffff_80ff]);
}

#[test]
fn guards_leave_lanes_out_and_branches_part_them() {
    let body = "\
	and.b32 %r1, %r0, 1;
	setp.eq.s32 %p1, %r1, 0;
	mov.u32 %r2, 100;
	@%p1 add.s32 %r2, %r2, 1;
	@!%p1 add.s32 %r2, %r2, 2;
	setp.gt.u32 %p2, %r0, 40;
	@%p2 bra FAR;
	add.s32 %r2, %r2, 10;
	mov.u32 %r3, 0;
LOOP:
	setp.ge.u32 %p3, %r3, %r0;
	@%p3 bra DONE;
	add.s32 %r2, %r2, 1000;
	add.s32 %r3, %r3, 1;
	bra.uni LOOP;
FAR:
	add.s32 %r2, %r2, 20;
DONE:
	st.global.u32 [%rd1], %r2;
	setp.eq.s32 %p4, %r0, 3;
	@%p4 ret;
	st.global.u32 [%rd1+4], 1;
";
    for seed in ["0", "1", "77"] {
        let launch = Launch { environment: &[("FUSESTEP_PTX_SEED", seed)], ..Launch::of(50) };
        let found = words(body, launch, &[0; 50]);
        for (thread, word) in found.into_iter().enumerate() {
            let parity = if thread % 2 == 0 { 101 } else { 102 };
            let path = if thread > 40 { 20 } else { 10 + 1000 * thread };
            let last = u64::from(thread != 3) << 32;
            assert_eq!(word, last + (parity + path) as u64, "thread {thread}, seed {seed}");
        }
    }
}
