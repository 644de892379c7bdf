//! Request ids without a system call for each: randomness is fetched for many at once.

use std::cell::RefCell;

use ipc::id::RequestId;

const ID_CHARACTERS: usize = 24;
const IDS: usize = 64;

thread_local! {
    /// What is left of the random characters; they are no secrets.
    static FETCHED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// An id as [`RequestId::random`] draws it.
pub fn request() -> RequestId {
    FETCHED.with_borrow_mut(|fetched| {
        if fetched.len() < ID_CHARACTERS {
            *fetched = ipc::id::random_text(ID_CHARACTERS * IDS);
        }
        let rest = fetched.len() - ID_CHARACTERS;
        let id = ["req_", &fetched[rest..]].concat();
        fetched.truncate(rest);
        RequestId::try_from(id).expect("letters and digits make an id")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_are_of_the_usual_shape_and_all_differ() {
        let ids: HashSet<_> = (0..IDS * 3).map(|_| request().to_string()).collect();

        assert_eq!(ids.len(), IDS * 3);
        assert!(ids.iter().all(|id| id.len() == RequestId::random().as_str().len()));
    }
}
