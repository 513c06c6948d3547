extension Client {
    /// The models that the server has, and which of them are loaded. Adapters are listed as `base:adapter`.
    public func models() async throws -> [Model] {
        try await IOThread.result { try Self.modelList(exchange($0)) }
    }

    /// Begins to load a model, so that the first request need not wait for it; ``models()`` tells when it is done.
    public func load(_ model: String) async throws { try await change(model, "/models/load") }

    /// Unloads a model as soon as its requests have ended. One that the server was told to keep is refused.
    public func unload(_ model: String) async throws { try await change(model, "/models/unload") }

    private func change(_ model: String, _ path: String) async throws {
        _ = try await IOThread.result { try Self.post(path, ["model": .string(model)], exchange($0), as: JSONValue.self) }
    }

    /// How many tokens a conversation has, with all that the model's template puts around it, to know before it is sent.
    ///
    /// Tools are not counted.
    public func countTokens(_ messages: [Message], model: String? = nil) async throws -> Int {
        struct Count: Decodable {
            var tokens: Int
            enum CodingKeys: String, CodingKey { case tokens = "input_tokens" }
        }
        let system = messages.filter { $0.role == .system }.map(\.content).joined(separator: "\n")
        let others = messages.filter { $0.role != .system }.map { message -> JSONValue in
            ["role": .string(message.role.rawValue), "content": message.content(as: \.block)]
        }
        return try await IOThread.result { waker in
            let exchange = exchange(waker)
            var body: JSONObject = ["model": .string(try name(model, exchange)), "messages": .array(others)]
            body["system"] = system.isEmpty ? nil : .string(system)
            return try Self.post("/v1/messages/count_tokens", .object(body), exchange, as: Count.self).tokens
        }
    }
}
