//! Message content: text parts joined by a blank line, with image placeholders.

use crate::types::{ImageSource, Prompt};

const SEPARATOR: &str = "\n\n";

/// Collects the parts of one message. Placeholders are recorded as special ranges; the same
/// spelling inside client text stays plain.
#[derive(Debug, Default)]
pub struct Content {
    pub prompt: Prompt,
    pub images: Vec<ImageSource>,
    num_parts: usize,
}

impl Content {
    /// Content of one plain text; takes the string without copying it.
    pub fn of(text: String) -> Self {
        Content { prompt: plain(text), images: Vec::new(), num_parts: 1 }
    }

    pub fn push_text(&mut self, text: String) {
        if self.num_parts == 0 {
            self.prompt.text = text;
        } else {
            self.prompt.text.push_str(SEPARATOR);
            self.prompt.text.push_str(&text);
        }
        self.num_parts += 1;
    }

    /// Appends a placeholder spelled `spelling`; an empty spelling writes nothing.
    pub fn push_image(&mut self, image: ImageSource, spelling: &str) {
        if self.num_parts > 0 {
            self.prompt.text.push_str(SEPARATOR);
        }
        let start = self.prompt.text.len();
        self.prompt.text.push_str(spelling);
        if !spelling.is_empty() {
            self.prompt.specials.push((start, self.prompt.text.len()));
        }
        self.images.push(image);
        self.num_parts += 1;
    }
}

/// Text without placeholders.
pub fn plain(text: String) -> Prompt {
    Prompt { text, specials: Vec::new() }
}
