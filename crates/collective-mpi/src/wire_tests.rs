use fusestep_collective::CallContext;
use fusestep_tensor::DType;

use super::*;

#[test]
fn headers_come_back_as_they_were() {
    for membership in [None, Some((0, 0)), Some((u32::MAX, 3))] {
        let header = Header {
            fingerprint: Fingerprint {
                sequence: u64::MAX - 1,
                operation: Operation::Gather { root: 5 },
                dtype: DType::U16,
                numel: 1 << 40,
                counts_hash: 3,
                context: CallContext {
                    plan_hash: 9,
                    bucket: Some(7),
                },
            },
            membership: membership.map(|(colour, key)| Membership { colour, key }),
            proposal: 77,
        };
        assert_eq!(Header::from_bytes(&header.to_bytes()), Some(header));
    }
    assert_eq!(Header::from_bytes(&[0; 8]), None);
    assert_eq!(Header::from_bytes(&[0xff; HEADER_BYTES]), None);
}

#[test]
fn errors_come_back_as_they_were_and_long_texts_are_cut() {
    let errors = [
        CollectiveError::Late {
            ranks: vec![1, 3],
            operation: "barrier",
            sequence: 4,
            bucket: Some(2),
            timeout_ms: 5,
        },
        CollectiveError::Mismatch {
            field: Field::Root,
            sequence: 1,
            bucket: None,
            expected_rank: 0,
            expected: "1".into(),
            expected_operation: "reduce",
            found_rank: 2,
            found: "2".into(),
            found_operation: "broadcast",
        },
        CollectiveError::Panicked { rank: 1, calls: 2 },
        CollectiveError::Left { rank: 1, calls: 0 },
        CollectiveError::Aborted {
            rank: 0,
            reason: "enough".into(),
        },
        CollectiveError::Dropped {
            rank: 3,
            operation: "all-reduce",
        },
        CollectiveError::Refused {
            rank: 1,
            operation: "split",
            reason: "expected ä".into(),
        },
        CollectiveError::Engine {
            rank: 1,
            operation: "scatter",
            reason: "no".into(),
        },
        CollectiveError::Undefined {
            rank: 1,
            operation: "reduce",
            reduce: ReduceOp::Average,
            dtype: DType::I64,
        },
    ];
    for error in errors {
        let notice = Notice {
            origin: 3,
            entered: 8,
            error,
        };
        assert_eq!(Notice::from_bytes(&notice.to_bytes()), Some(notice));
    }
    let long = CollectiveError::Aborted {
        rank: 0,
        reason: "ä".repeat(5000),
    };
    let notice = Notice {
        origin: 0,
        entered: 0,
        error: long,
    };
    assert!(notice.to_bytes().len() < 2048);
    assert!(Notice::from_bytes(&notice.to_bytes()).is_some());
    assert_eq!(Notice::from_bytes(b"[]"), None);
}
