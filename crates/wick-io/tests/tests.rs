//! What a user of the reader relies on when things go wrong, through the public interface only.

mod failures;
mod slow;
mod tickets;
mod util;
