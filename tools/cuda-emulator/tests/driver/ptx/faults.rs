//! Programs that do what they must not: each is reported with entry, block, thread and line.

use super::{FIRST_LINE, Launch, complaint, words};

/// Requires the program to fail with the code, and the report to name the place and to say this.
fn fails(body: &str, launch: Launch, code: u32, place: (&str, usize), says: &str) {
    let text = complaint(body, launch, &[0; 128], code);
    let (thread, line) = place;
    let line = FIRST_LINE + line - 1;
    for part in [format!("probe block {thread} line {line} `"), says.to_owned()] {
        assert!(text.contains(&part), "expected {part} in {text}");
    }
}

const FIRST: &str = "(0, 0, 0) thread (0, 0, 0)";

#[test]
fn accesses_out_of_bounds_and_misaligned_are_named() {
    let one = Launch::of(1);
    let illegal = 700;
    fails("\tld.global.u32 %r1, [%rd0+1024];", one, illegal, (FIRST, 1), "load of 4 bytes");
    fails("\n\tst.global.u64 [%rd0+-8], 1;", one, illegal, (FIRST, 2), "store of 8 bytes");
    fails("\tld.global.u32 %r1, [0];", one, illegal, (FIRST, 1), "load of 4 bytes at 0x0");
    let shared = "\tmov.u64 %rd2, shared;\n\tst.shared.u32 [%rd2+8192], 0;";
    fails(shared, one, illegal, (FIRST, 2), "shared access of 4 bytes");
    let parameters = "\tld.param.u32 %r1, [probe_param_0+16];";
    fails(parameters, one, illegal, (FIRST, 1), "out of bounds of the 16 bytes");
    let misaligned = 716;
    fails(
        "\tld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%rd0+8];",
        one,
        misaligned,
        (FIRST, 1),
        "16 bytes",
    );
    fails("\tld.global.u16 %h1, [%rd0+1];", one, misaligned, (FIRST, 1), "misaligned");
    let third = "\tsetp.eq.s32 %p1, %r0, 3;\n\t@%p1 st.global.u32 [%rd1+2], 1;";
    fails(third, Launch::of(40), misaligned, ("(0, 0, 0) thread (3, 0, 0)", 2), "misaligned");
}

#[test]
fn shared_memory_must_be_written_before_it_is_read() {
    let body = "\tmov.u64 %rd2, shared;\n\tld.shared.f32 %f1, [%rd2+64];";
    fails(
        body,
        Launch::of(1),
        719,
        (FIRST, 2),
        "byte 64 of shared memory, which no thread has written",
    );
    // Half of what is read has been written; a block finds nothing of the block before it.
    let body = "\tmov.u64 %rd2, shared;\n\tst.shared.u32 [%rd2], 1;\n\tld.shared.u64 %rd3, [%rd2];";
    fails(body, Launch::of(1), 719, (FIRST, 3), "load of 8 bytes at byte 0 of shared memory");
    let body = "\
	mov.u64 %rd2, shared;
	mov.u32 %r1, %ctaid.x;
	setp.ne.s32 %p1, %r1, 0;
	@%p1 ld.shared.u32 %r2, [%rd2];
	st.shared.u32 [%rd2], 1;
";
    let launch = Launch { grid: 2, environment: &[("FUSESTEP_PTX_SEED", "0")], ..Launch::of(1) };
    fails(body, launch, 719, ("(1, 0, 0) thread (0, 0, 0)", 4), "no thread has written");
}

#[test]
fn races_in_shared_memory_are_found_in_every_schedule() {
    // The barrier between store and load is missing.
    let unordered = "\
	mov.u64 %rd2, shared;
	mul.wide.u32 %rd3, %r0, 8;
	add.s64 %rd4, %rd2, %rd3;
	st.shared.u64 [%rd4], %rd3;
	xor.b32 %r1, %r0, 1;
	mul.wide.u32 %rd5, %r1, 8;
	add.s64 %rd6, %rd2, %rd5;
	ld.shared.u64 %rd7, [%rd6];
	st.global.u64 [%rd1], %rd7;
";
    // With its barrier.
    let ordered = unordered.replace("\txor.b32", "\tbar.sync 0;\n\txor.b32");
    // All threads store to one place.
    let together = "\tmov.u64 %rd2, shared;\n\tst.shared.u32 [%rd2], %r0;";
    // Bytes beside each other are no race.
    let beside = "\
	mov.u64 %rd2, shared;
	cvt.u64.u32 %rd3, %r0;
	add.s64 %rd4, %rd2, %rd3;
	cvt.u16.u32 %h1, %r0;
	st.shared.u8 [%rd4], %h1;
	ld.shared.u8 %h2, [%rd4];
	st.global.u16 [%rd1], %h2;
";
    for seed in ["0", "1", "2"] {
        let launch = Launch { environment: &[("FUSESTEP_PTX_SEED", seed)], ..Launch::of(64) };
        let text = complaint(unordered, launch, &[0; 64], 719);
        // Its pair may not have stored yet.
        let named = text.contains("race: load of 8 bytes") || text.contains("race: store of 8");
        assert!(named || text.contains("no thread has written"), "{text}");
        words(&ordered, launch, &[0; 64]);
        let text = complaint(together, launch, &[0; 64], 719);
        assert!(
            text.contains("race: store of 4 bytes at 0x0 without order after a store"),
            "{text}"
        );
        let found = words(beside, launch, &[0; 64]);
        assert_eq!(found, (0..64).collect::<Vec<u64>>());
    }
}

#[test]
fn races_in_global_memory_are_found_within_and_between_blocks() {
    let same_place = "\tst.global.u32 [%rd0], %r0;";
    let launch = Launch { environment: &[("FUSESTEP_PTX_SEED", "0")], ..Launch::of(2) };
    let second = "(0, 0, 0) thread (1, 0, 0)";
    fails(same_place, launch, 719, (second, 1), "after a store by block 0 thread 0 at barrier 0");
    let between = Launch { grid: 2, block: 1, ..launch };
    let other = "(1, 0, 0) thread (0, 0, 0)";
    fails(same_place, between, 719, (other, 1), "race: store of 4 bytes");
    // A load of one and a store of another, in either order.
    let mixed = "\
	mov.u32 %r1, %ctaid.x;
	setp.eq.s32 %p1, %r1, 0;
	@%p1 ld.global.u64 %rd2, [%rd0];
	@!%p1 st.global.u64 [%rd0], 1;
";
    fails(mixed, between, 719, (other, 4), "race: store of 8 bytes");
    // A barrier orders a block's threads and nobody else's.
    let barrier = "\
	setp.eq.s32 %p1, %r0, 0;
	@%p1 st.global.u64 [%rd0], 9;
	bar.sync 0;
	ld.global.u64 %rd2, [%rd0];
	bar.sync 0;
	st.global.u64 [%rd1], %rd2;
";
    assert_eq!(words(barrier, Launch::of(33), &[0; 33]), [9; 33]);
}

#[test]
fn waits_that_never_end_are_named() {
    let half = "\tsetp.lt.u32 %p1, %r0, 32;\n\t@%p1 ret;\n\tbar.sync 0;";
    let text = complaint(half, Launch::of(64), &[0; 64], 719);
    assert!(
        text.contains("32 threads are at a barrier") && text.contains("32 have ended"),
        "{text}"
    );
    assert!(text.contains("thread (32, 0, 0) line "), "{text}");
    // Lanes of one warp at two barriers, which an aligned one does not allow.
    let parted = "\
	setp.lt.u32 %p1, %r0, 16;
	@%p1 bra OTHER;
	bar.sync 0;
	ret;
OTHER:
	bar.sync 0;
";
    let text = complaint(parted, Launch::of(32), &[0; 32], 719);
    assert!(text.contains("an aligned barrier, and this thread of the warp waits at"), "{text}");
    let shuffle = "\
	setp.eq.s32 %p1, %r0, 5;
	@%p1 ret;
	shfl.sync.bfly.b32 %r2|%p2, %r0, 1, 31, -1;
";
    let text = complaint(shuffle, Launch::of(32), &[0; 32], 719);
    assert!(text.contains("31 at a shuffle, 1 have ended"), "{text}");
}

#[test]
fn lanes_of_a_shuffle_must_agree() {
    let masks = "\
	setp.eq.s32 %p1, %r0, 5;
	selp.b32 %r1, 1, -1, %p1;
	shfl.sync.bfly.b32 %r2|%p2, %r0, 1, 31, %r1;
";
    let text = complaint(masks, Launch::of(32), &[0; 32], 719);
    assert!(text.contains("the mask of this lane differs"), "{text}");
    let absent = "\tshfl.sync.bfly.b32 %r2|%p2, %r0, 16, 31, 65535;";
    let text = complaint(absent, Launch::of(16), &[0; 16], 719);
    assert!(text.contains("lane 0 asks lane 16, which takes no part"), "{text}");
}

#[test]
fn entries_ask_for_no_more_shared_memory_than_a_block_has() {
    let body = "\t.shared .align 8 .b8 more[45000];\n\tmov.u64 %rd2, more;";
    let text = complaint(body, Launch::of(1), &[0], 701);
    assert!(text.contains("49152 bytes of shared memory"), "{text}");
}
