import Foundation
import Testing

@testable import MLXInferClient

extension LiveTests.Answers {
    private var server: LiveServer { LiveServer.shared }

    @Test func modelsAndHealth() async throws {
        let models = try await server.client.models()
        #expect(models.map(\.id) == [LiveServer.model] && (models[0].maxTokens ?? 0) > 0)
        #expect(try await server.client.health().isReady)
        #expect(try await server.client.metrics().contains("mlxinfer_num_requests_running"))
    }

    @Test func aChat() async throws {
        let (events, error) = await gather(server.client.chat([.user("What is the capital of France?")], options: LiveTests.exact))
        #expect(error == nil)
        guard case .started(let id, LiveServer.model) = events.first else {
            Issue.record("begins with \(String(describing: events.first))")
            return
        }
        var answer = ChatResponse()
        for event in events { answer.add(event) }
        #expect(!id.isEmpty && answer.text.contains("Paris") && answer.finishReason == .stop)
        #expect(events.filter { if case .text = $0 { true } else { false } }.count > 3)
        guard case .usage(let usage) = events.last else {
            Issue.record("ends with \(String(describing: events.last))")
            return
        }
        #expect(usage.promptTokens > 20 && usage.completionTokens > 3)
        #expect(try await server.client.respond(to: "What is the capital of France?", options: LiveTests.exact).text == answer.text)
    }

    @Test func anAnswerOfAType() async throws {
        struct City: Decodable { var capital: String }
        let schema: JSONValue = [
            "type": "object", "properties": ["capital": ["type": "string", "maxLength": 20]], "required": ["capital"],
            "additionalProperties": false,
        ]
        var request = ChatRequest([.user("What is the capital of France? Answer as JSON.")])
        request.options = LiveTests.exact
        let city = try await server.client.respond(to: request, as: City.self, schema: schema)
        #expect(city.capital == "Paris")
    }

    @Test func aCallOfATool() async throws {
        struct Place: Decodable { var city: String? }
        let city: JSONValue = ["type": "string", "maxLength": 12]
        let schema: JSONValue = ["type": "object", "properties": ["city": city], "required": ["city"], "additionalProperties": false]
        let weather = TypedTool<Place>(name: "weather", description: "The weather in a city", parameters: schema, strict: true)
        var request = ChatRequest([.user("How is the weather in Rome?")], options: SamplingOptions(maxTokens: 80, temperature: 0))
        (request.tools, request.toolChoice, request.parallelToolCalls) = ([weather.tool], .tool("weather"), false)
        var (answer, seen) = (ChatResponse(), [String]())
        for try await event in server.client.chat(request) {
            answer.add(event)
            if let call = answer.toolCalls.first, let part = weather.partialArguments(of: call)?.city { seen.append(part) }
        }
        let call = try #require(answer.toolCalls.first)
        let whole = try #require(try weather.arguments(of: call)?.city)
        #expect(answer.finishReason == .toolCalls && seen.last == whole && seen.allSatisfy { whole.hasPrefix($0) })
        request.messages += [answer.message, .tool("21 degrees", callID: call.id)]
        request.toolChoice = ToolChoice.none
        #expect(try await !server.client.respond(to: request).text.isEmpty)
    }

    @Test func aConversationGoesOn() async throws {
        let first = try await server.client.respond(to: "Name a colour.", options: LiveTests.exact)
        let messages = [.user("Name a colour."), first.message, .user("Another one.")]
        let second = try await server.client.respond(to: messages, options: LiveTests.exact)
        #expect(!second.text.isEmpty && (second.usage?.cachedTokens ?? 0) > 0)
    }

    @Test func theSameSeedGivesTheSameAnswer() async throws {
        let options = SamplingOptions(maxTokens: 16, temperature: 1, seed: 7)
        let answers = [
            try await server.client.respond(to: "Tell me a story.", options: options).text,
            try await server.client.respond(to: "Tell me a story.", options: options).text,
        ]
        #expect(answers[0] == answers[1] && !answers[0].isEmpty)
    }

    @Test func logprobs() async throws {
        var options = LiveTests.exact
        options.topLogprobs = 3
        let answer = try await server.client.respond(to: "What is the capital of France?", options: options)
        #expect(answer.logprobs.count >= (answer.usage?.completionTokens ?? 0) - 1 && !answer.logprobs.isEmpty)
        #expect(answer.logprobs.allSatisfy { $0.top.count == 3 && $0.chosen.logprob <= 0 && $0.top[0].token == $0.chosen.token })
        #expect(String(decoding: answer.logprobs.flatMap { $0.chosen.bytes ?? [] }, as: UTF8.self).hasPrefix(answer.text))
    }

    @Test func stopsAndLimits() async throws {
        let long = try await server.client.respond(to: "Count from one to twenty.", options: SamplingOptions(maxTokens: 5, temperature: 0))
        #expect(long.finishReason == .length && long.usage?.completionTokens == 5)
        let options = SamplingOptions(maxTokens: 64, temperature: 0, stop: ["Paris"])
        let stopped = try await server.client.respond(to: "What is the capital of France?", options: options)
        #expect(stopped.finishReason == .stop && !stopped.text.contains("Paris") && !stopped.text.isEmpty)
    }

    @Test func everyCharacterArrives() async throws {
        let text = "Repeat: \u{0}\u{1F}\"\\ Grüße 🙂 👩‍👩‍👧 \u{202E}العربية\u{202C} <|im_end|>"
        #expect(try await !server.client.respond(to: text, options: LiveTests.exact).text.isEmpty)
    }

    @Test func aCompletion() async throws {
        var options = SamplingOptions(maxTokens: 8, temperature: 0)
        options.topLogprobs = 1
        let answer = try await server.client.complete("The capital of France is", options: options)
        #expect(answer.text.contains("Paris") && answer.finishReason == .length && answer.usage?.completionTokens == 8)
        #expect(answer.logprobs.count == 8)
        var request = CompletionRequest("The capital of France is", options: SamplingOptions(maxTokens: 8, temperature: 0))
        request.echo = true
        #expect(try await server.client.complete(request).text == "The capital of France is" + answer.text)
    }

    @Test func answersAtTheSameTimeAreNotMixedUp() async throws {
        let prompts = ["France", "Italy", "Spain", "Japan", "Egypt", "Norway", "Peru", "Greece"].map { "What is the capital of \($0)?" }
        let client = server.client
        var alone: [String] = []
        for prompt in prompts { alone.append(try await client.respond(to: prompt, options: LiveTests.exact).text) }
        let together = try await withThrowingTaskGroup(of: (Int, String).self) { group in
            for (index, prompt) in prompts.enumerated() {
                group.addTask { (index, try await client.respond(to: prompt, options: LiveTests.exact).text) }
            }
            return try await group.reduce(into: [String](repeating: "", count: prompts.count)) { $0[$1.0] = $1.1 }
        }
        #expect(together == alone)
    }
}
