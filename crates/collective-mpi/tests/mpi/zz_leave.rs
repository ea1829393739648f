//! The end of the job.

use super::worlds::leave;

#[test]
fn the_world_is_left_in_good_order() {
    leave();
}
