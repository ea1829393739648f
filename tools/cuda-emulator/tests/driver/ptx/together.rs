//! Threads that wait for each other and exchange values.

use super::{Launch, words};

/// A program for 32 lanes: each shuffles its number and writes what it gets, and whether from a
/// lane within its segment.
fn shuffled(mode: &str, by: u32, clamp: u32) -> Vec<(u64, u64)> {
    let body = format!(
        "\
	add.s32 %r1, %r0, 100;
	shfl.sync.{mode}.b32 %r2|%p1, %r1, {by}, {clamp}, -1;
	selp.u32 %r3, 1, 0, %p1;
	st.global.v2.u32 [%rd1], {{%r2, %r3}};
"
    );
    let found = words(&body, Launch::of(32), &[0; 32]);
    found.iter().map(|word| (word & 0xffff_ffff, word >> 32)).collect()
}

#[test]
fn shuffles_take_the_lane_that_the_mode_names() {
    let expect = |mode: &str, by: u32, clamp: u32, from: &dyn Fn(i64) -> Option<i64>| {
        for (lane, found) in shuffled(mode, by, clamp).into_iter().enumerate() {
            let expected = match from(lane as i64) {
                Some(other) => (100 + other as u64, 1),
                None => (100 + lane as u64, 0),
            };
            assert_eq!(found, expected, "{mode} by {by}, clamp {clamp:#x}, lane {lane}");
        }
    };
    for by in [1, 4, 16] {
        let distance = i64::from(by);
        expect("bfly", by, 31, &|lane| Some(lane ^ distance));
        expect("down", by, 31, &|lane| (lane + distance < 32).then_some(lane + distance));
        expect("up", by, 0, &|lane| (lane >= distance).then_some(lane - distance));
    }
    expect("idx", 7, 31, &|_| Some(7));
    // Segments of 8 lanes: a mask of 24 in bits 8 to 12.
    let segment = 24 << 8 | 7;
    expect("down", 3, segment, &|lane| (lane % 8 + 3 < 8).then_some(lane + 3));
    expect("up", 3, 24 << 8, &|lane| (lane % 8 >= 3).then_some(lane - 3));
    expect("idx", 2, segment, &|lane| Some(lane / 8 * 8 + 2));
    expect("bfly", 8, segment, &|lane| (lane & 8 != 0).then_some(lane ^ 8));
}

#[test]
fn a_barrier_shows_all_threads_what_others_have_stored() {
    let body = "\
	mov.u64 %rd2, shared;
	mul.wide.u32 %rd3, %r0, 8;
	add.s64 %rd4, %rd2, %rd3;
	cvt.u64.u32 %rd5, %r0;
	st.shared.u64 [%rd4], %rd5;
	bar.sync 0;
	mov.u32 %r1, %ntid.x;
	sub.s32 %r2, %r1, %r0;
	mul.wide.u32 %rd6, %r2, 8;
	add.s64 %rd7, %rd2, %rd6;
	ld.shared.u64 %rd8, [%rd7+-8];
	st.global.u64 [%rd1], %rd8;
";
    for seed in ["0", "1", "2", "3"] {
        for block in [1, 33, 512, 1000] {
            let launch =
                Launch { environment: &[("FUSESTEP_PTX_SEED", seed)], ..Launch::of(block) };
            let found = words(body, launch, &vec![0; block as usize]);
            let expected: Vec<u64> = (0..u64::from(block)).rev().collect();
            assert_eq!(found, expected, "seed {seed}");
        }
    }
}

#[test]
fn every_seed_is_a_schedule_of_its_own_and_the_same_again() {
    // The last of 64 warps to write wins.
    let body = "\tst.global.u32 [%rd0], %r0;";
    let last = |seed: &str| {
        let environment = &[("FUSESTEP_PTX_SEED", seed), ("FUSESTEP_PTX_RACES", "0")];
        let launch = Launch { environment, ..Launch::of(1024) };
        words(body, launch, &[0; 1])[0]
    };
    let seeds = ["1", "2", "3", "4", "5", "6"];
    let found = seeds.map(last);
    assert_eq!(found, seeds.map(last));
    assert!(found.iter().any(|winner| *winner != found[0]), "{found:?}");
    assert_eq!(last("0"), 1023, "in order");
}

#[test]
fn entries_are_counted_instruction_by_instruction() {
    let path = plain_path("counts.jsonl");
    let body = "\
	ld.global.v2.u64 {%rd2, %rd3}, [%rd0];
	setp.lt.u32 %p1, %r0, 8;
	@%p1 st.global.u32 [%rd1+16], %r0;
	bar.sync 0;
	mul.rn.f64 %d1, 0d3FF0000000000000, 0d3FF0000000000000;
	div.rn.f32 %f1, 0f3F800000, 0f3F800000;
	sqrt.rn.f64 %d2, %d1;
";
    let environment = [("FUSESTEP_PTX_COUNTS", path.as_str())];
    let launch = Launch { environment: &environment, ..Launch::of(64) };
    words(body, launch, &[0; 70]);
    let text = std::fs::read_to_string(&path).expect("written at the end");
    // Four instructions before the program's own and the return behind it.
    for part in [
        "\"entry\":\"probe\"",
        "\"launches\":1,\"instructions\":768",
        "\"doubles\":64,\"divisions\":128",
        "\"load_sectors\":2,\"store_sectors\":3",
        "\"loads\":{\"16\":64},\"stores\":{\"4\":8}",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

fn plain_path(name: &str) -> String {
    let path = super::plain().libraries.join(name);
    path.to_str().expect("text").to_owned()
}
