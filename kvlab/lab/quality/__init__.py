"""Quality of compressed caches: a model reads real text through each, beside other caches."""
