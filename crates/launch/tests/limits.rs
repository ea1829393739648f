//! The tensors that fit into a launch, and their places in host memory.

use fusestep_launch::{
    ArgumentLayout, Batch, Batchable, HostList, HostSpan, HostSpans, LaunchError, LaunchLimits,
    MAX_LAUNCHES, Places, ROW_VALUES, Record, batches,
};

const LAYOUT: ArgumentLayout = ArgumentLayout { lists: 2, scalar_bytes: 8, step_scalar_bytes: 8 };

fn tensor(tensor: u32, numel: u64) -> Batchable {
    Batchable { tensor, first_element: 0, numel, group: 0 }
}

#[test]
fn a_launch_has_as_many_records_as_fit_and_not_one_more() {
    for records in [1, 3] {
        let exact = LAYOUT.bytes(records, 1);
        for (argument_bytes, most) in
            [(exact, records), (exact + 31, records), (exact + 32, records + 1)]
        {
            let limits = LaunchLimits::with_argument_bytes(argument_bytes);
            let tensors = (0..7).map(|at| tensor(at, 5));
            let found = batches("test", tensors, LAYOUT, limits).unwrap();
            let lens: Vec<usize> = found.iter().map(|batch| batch.records.len()).collect();
            let expected: Vec<usize> =
                (0..7usize).collect::<Vec<_>>().chunks(most).map(<[usize]>::len).collect();
            assert_eq!(lens, expected, "{argument_bytes} bytes");
        }
    }
}

#[test]
fn launches_are_counted_before_they_are_made() {
    let limits =
        LaunchLimits { chunk_elements: 4, chunks_per_launch: 4, ..LaunchLimits::default() };
    let of = |launches: usize| {
        let found = batches("test", [tensor(0, 16 * launches as u64)], LAYOUT, limits);
        found.map(|batches| batches.len())
    };
    assert_eq!(of(MAX_LAUNCHES), Ok(MAX_LAUNCHES));
    let expected = LaunchError::TooMany { kernel: "test".to_owned(), expected: MAX_LAUNCHES };
    assert_eq!(of(MAX_LAUNCHES + 1), Err(expected.clone()));
    assert_eq!(of(MAX_LAUNCHES * 1000), Err(expected));
}

#[test]
fn spans_begin_where_the_record_begins_in_its_tensor() {
    let record = Record { tensor: 1, first_element: 1024, numel: 1500, first_chunk: 0, group: 0 };
    let batch = Batch { records: vec![record], groups: vec![6], chunks: 2 };
    let places = Places { offsets: &[0, 64, 4096], members: &[5, 9] };
    let batches = [batch];
    let spans = |first, end| HostSpans::of(&batches, places, first, end).collect::<Vec<_>>();
    let span = HostSpan { start: 1088, numel: 1500, group: 6, parameter: 9, first_element: 1024 };
    assert_eq!(spans(0, 4096), [span]);
    assert_eq!(spans(1100, 1110), [HostSpan { start: 0, numel: 10, first_element: 1036, ..span }]);
    // Two sums of eight units, how often the tensor was skipped, and whether it was this time.
    assert_eq!(ROW_VALUES, 18);
}

#[test]
fn lists_are_read_cut_and_written_in_place() {
    let mut bytes = [1u8, 2, 3, 4, 5, 6];
    assert_eq!(HostList::Absent.bytes(), []);
    assert_eq!(HostList::Read(&bytes).bytes(), bytes);
    assert_eq!(HostList::Read(&bytes).elements::<u8>(), bytes);
    assert_eq!(HostList::Read(&bytes).part(1..3).bytes(), [2, 3]);
    let (left, right) = HostList::Read(&bytes).split_at(4);
    assert_eq!((left.bytes(), right.bytes()), (&bytes[..4], &bytes[4..]));
    let (mut left, right) = HostList::ReadWrite(&mut bytes).split_at(2);
    assert_eq!(left.part(1..2).bytes(), [2]);
    left.elements_mut::<u8>().fill(9);
    assert_eq!(right.elements::<u8>(), [3, 4, 5, 6]);
    assert_eq!(HostList::ReadWrite(&mut bytes).bytes(), [9, 9, 3, 4, 5, 6]);
    let span = HostSpan { start: 10, numel: 8, group: 1, parameter: 2, first_element: 100 };
    let part = |start, numel, first_element| HostSpan { start, numel, first_element, ..span };
    assert_eq!(span.part(3, 4), part(13, 4, 103));
    assert_eq!(span.part(3, 9), part(13, 5, 103));
}

#[test]
fn a_limit_of_zero_is_refused_by_name() {
    let layout = LAYOUT;
    let (good, one) = (LaunchLimits::default(), layout.bytes(1, 1));
    let zero = |limits: LaunchLimits| match batches("test", [], layout, limits) {
        Err(LaunchError::ZeroLimit { what }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(zero(LaunchLimits { chunk_elements: 0, ..good }), "chunk elements");
    assert_eq!(zero(LaunchLimits { chunks_per_launch: 0, ..good }), "chunks per launch");
    assert_eq!(good.validate(), Ok(()));
    assert!(LaunchLimits { chunk_elements: 0, ..good }.validate().is_err());
    // As many bytes as one record takes are enough.
    let exact = LaunchLimits::with_argument_bytes(one);
    assert!(batches("test", [], layout, exact).is_ok());
    let error = batches("test", [], layout, LaunchLimits::with_argument_bytes(one - 1));
    let expected =
        LaunchError::LimitTooSmall { kernel: "test".to_owned(), expected: one, found: one - 1 };
    assert_eq!(error, Err(expected));
}
