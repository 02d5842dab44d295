"""Web pages to texts: addresses sifted, pages fetched with manners."""
