/// A type that a model can write and this package can read.
public typealias Guided = Decodable & JSONSchemaProviding & Sendable

extension Client {
    /// The answer to a conversation as a type of yours, whose schema constrains the model.
    ///
    /// ```swift
    /// let trip = try await client.generate(Trip.self, [.user("A weekend in Rome")])
    /// ```
    ///
    /// Say in the prompt what the answer is to contain: the schema alone does not tell the model.
    ///
    /// - Throws: ``MLXInferError/undecodableAnswer(text:reason:)`` if the limit of tokens cut the answer off,
    ///   ``MLXInferError/api(_:)`` if the server cannot enforce the schema.
    public func generate<Value: Guided>(
        _ type: Value.Type = Value.self, _ messages: [Message], options: SamplingOptions = SamplingOptions()
    ) async throws -> Value {
        try await generate(type, ChatRequest(messages, options: options))
    }

    /// The answer to one message as a type of yours.
    public func generate<Value: Guided>(
        _ type: Value.Type = Value.self, _ prompt: String, options: SamplingOptions = SamplingOptions()
    ) async throws -> Value {
        try await generate(type, [.user(prompt)], options: options)
    }

    /// The answer to a request as a type of yours; its ``ChatRequest/responseFormat`` is replaced.
    public func generate<Value: Guided>(_ type: Value.Type = Value.self, _ request: ChatRequest) async throws -> Value {
        try await respond(to: request.guided(by: type)).decoded(as: type)
    }

    /// The answer to a conversation as a type of yours, while it is written.
    ///
    /// A reader that is slower than the model gets the newest snapshot. The last one has the whole ``Snapshot/value``.
    public func stream<Value: Guided>(
        _ type: Value.Type = Value.self, _ messages: [Message], options: SamplingOptions = SamplingOptions()
    ) -> AnswerEvents<Snapshot<Value>> {
        stream(type, ChatRequest(messages, options: options))
    }

    /// The answer to one message as a type of yours, while it is written.
    public func stream<Value: Guided>(
        _ type: Value.Type = Value.self, _ prompt: String, options: SamplingOptions = SamplingOptions()
    ) -> AnswerEvents<Snapshot<Value>> {
        stream(type, [.user(prompt)], options: options)
    }

    /// The answer to a request as a type of yours, while it is written; its ``ChatRequest/responseFormat`` is replaced.
    public func stream<Value: Guided>(_ type: Value.Type = Value.self, _ request: ChatRequest) -> AnswerEvents<Snapshot<Value>> {
        let guided = request.guided(by: type)
        return events("/v1/chat/completions", model: request.model, reader: SnapshotReader<Value>(), .newest()) { guided.json(model: $0) }
    }
}

extension ChatRequest {
    /// The request with a type's schema as the form of its answer.
    func guided<Value: JSONSchemaProviding>(by type: Value.Type) -> ChatRequest {
        var request = self
        request.responseFormat = .jsonSchema(name: ResponseFormat.name(of: type), schema: Value.jsonSchema.json.schemaForRequest())
        return request
    }
}

extension ResponseFormat {
    /// The name of a type, without what a schema's name may not have.
    static func name(of type: Any.Type) -> String {
        let name = String(describing: type).prefix { $0 != "<" }.filter { ($0.isLetter || $0.isNumber || $0 == "_") && $0.isASCII }
        return name.isEmpty ? "answer" : String(name.prefix(64))
    }
}
