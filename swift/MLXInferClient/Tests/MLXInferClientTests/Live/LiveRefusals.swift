import Testing

@testable import MLXInferClient

extension LiveTests.Refusals {
    private func refusal(_ change: (inout ChatRequest) -> Void) async -> APIError? {
        var request = ChatRequest([.user("Hi")], model: LiveServer.model)
        change(&request)
        guard case .api(let error) = await gather(LiveServer.shared.client.chat(request)).error else { return nil }
        return error
    }

    @Test func whatTheServerRefusesComesWithItsReason() async throws {
        let model = try #require(await refusal { $0.model = "../etc/passwd" })
        #expect(model.status == 404 && model.code == "model_not_found" && model.param == "model")
        let range = try #require(await refusal { $0.options.temperature = 9 })
        #expect(range.status == 400 && range.param == "temperature" && !range.message.isEmpty)
        let unknown = try #require(await refusal { $0.additionalFields = ["no_such_field": 1] })
        #expect(unknown.status == 400 && unknown.param == "no_such_field")
        let empty = try #require(await refusal { $0.messages = [] })
        #expect(empty.status == 400 && empty.param == "messages")
        let long = try #require(await refusal { $0.messages = [.user(String(repeating: "word ", count: 20_000))] })
        #expect(long.status == 400 && long.code == "context_length_exceeded")
    }

    @Test func whatTheServerCannotDo() async throws {
        let unheld: JSONValue = ["type": "array", "uniqueItems": true]
        let format = try #require(await refusal { $0.responseFormat = .jsonSchema(name: "a", schema: unheld) })
        #expect(format.status == 400 && format.param == "response_format" && format.message.contains("uniqueItems"))
        let strict: JSONValue = ["type": "object", "properties": ["a": ["type": "array", "uniqueItems": true]]]
        let tools = try #require(await refusal { $0.tools = [Tool(name: "a", description: "b", parameters: strict, strict: true)] })
        #expect(tools.status == 400 && tools.param == "tools[0]" && tools.message.contains("uniqueItems"))
        let typed = await #expect(throws: MLXInferError.self) {
            try await LiveServer.shared.client.respond(to: ChatRequest([.user("Hi")]), as: [String: Int].self, schema: unheld)
        }
        guard case .api(let error) = typed else {
            Issue.record("\(String(describing: typed))")
            return
        }
        #expect(error.param == "response_format" && error.requestID != nil)
    }

    @Test func aBodyThatIsTooLarge() async throws {
        let error = try #require(await refusal { $0.messages = [.user(String(repeating: "long ", count: 8 << 20))] })
        #expect(error.status == 413)
    }
}
