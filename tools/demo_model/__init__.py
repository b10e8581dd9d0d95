"""Recipe of the small model that ships with mlxlin: corpora, made-up chats, tokenizer, training, evaluation."""
