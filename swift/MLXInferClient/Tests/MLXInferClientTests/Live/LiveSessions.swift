#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels
    import Testing

    @testable import MLXInferClient
    @testable import MLXInferFoundationModels

    extension LiveTests.Sessions {
        @available(macOS 27, iOS 27, *)
        private static var model: MLXInferLanguageModel {
            MLXInferLanguageModel(endpoint: .unix(path: LiveServer.shared.path), reconnect: Reconnect(upTo: .seconds(60)))
        }

        @available(macOS 27, iOS 27, *)
        private static var exact: GenerationOptions { GenerationOptions(samplingMode: .greedy, maximumResponseTokens: 48) }

        @available(macOS 27, iOS 27, *)
        @Test func anAnswerEqualsThatOfTheClient() async throws {
            let session = LanguageModelSession(model: Self.model, instructions: "Answer in one word.")
            let answer = try await session.respond(to: "What is the capital of France?", options: Self.exact)
            let messages: [Message] = [.system("Answer in one word."), .user("What is the capital of France?")]
            let plain = try await LiveServer.shared.client.respond(to: messages, options: SamplingOptions(maxTokens: 48, temperature: 0))
            #expect(answer.content == plain.text && answer.content.contains("Paris"))
            #expect(answer.usage.output.totalTokenCount == plain.usage?.completionTokens)
        }

        @available(macOS 27, iOS 27, *)
        @Test func aTripDecodesAtTemperatureOne() async throws {
            let options = GenerationOptions(temperature: 1, maximumResponseTokens: 400)
            let answer = try await LanguageModelSession(model: Self.model).respond(
                to: "Plan a trip to Rome in a few words.", schema: SessionCases.trip, options: options)
            guard case .structure(let properties, _) = answer.content.kind else {
                Issue.record("\(answer.content.jsonString)")
                return
            }
            #expect(Set(properties.keys) == ["title", "days"])
        }

        @available(macOS 27, iOS 27, *)
        @Test func aRequiredToolIsCalledAndItsResultIsRead() async throws {
            let first = SessionCases.request(
                SessionCases.prompt("What is the weather in Rome?"), tools: [SessionCases.weather],
                options: GenerationOptions(samplingMode: .greedy, maximumResponseTokens: 64, toolCallingMode: .required))
            let sent = try SentRequest(first)
            let answer = try await LiveServer.shared.client.respond(to: sent.chat)
            let call = try #require(answer.toolCalls.first)
            #expect(call.name == "weather" && (try? call.decodedArguments(as: [String: String].self))?.keys.sorted() == ["city"])
            let calls = SessionCases.History.ToolCalls(id: "c", [SessionCases.call(call.id, call.name, call.arguments)])
            let output = SessionCases.output(call.id, call.name, SessionCases.text("Rain in Rome"))
            let resumed = LanguageModelSession(
                model: Self.model, tools: [SessionCases.Weather()],
                transcript: .init(entries: [SessionCases.prompt("What is the weather in Rome?"), .toolCalls(calls), output]))
            let options = GenerationOptions(samplingMode: .greedy, maximumResponseTokens: 32, toolCallingMode: .disallowed)
            #expect(try await !resumed.respond(to: "Well?", options: options).content.isEmpty)
        }

        @available(macOS 27, iOS 27, *)
        @Test func prewarmingFillsThePrefixCacheForAnotherSession() async throws {
            let server = LiveServer()
            let model = MLXInferLanguageModel(endpoint: .unix(path: server.path), reconnect: Reconnect(upTo: .seconds(60)))
            let instructions = String(repeating: "Answer with great care, and name your sources. ", count: 30)
            let first = LanguageModelSession(model: model, instructions: instructions)
            let executor = MLXInferLanguageModel.Executor(configuration: model.executorConfiguration)
            try await executor.prefill(first.transcript)
            let second = LanguageModelSession(model: model, instructions: instructions)
            let answer = try await second.respond(to: "What is the capital of France?", options: Self.exact)
            let input = answer.usage.input
            #expect(input.cachedTokenCount > input.totalTokenCount * 8 / 10)
            print("prewarmed: \(input.cachedTokenCount) of \(input.totalTokenCount) tokens were cached")
        }

        @available(macOS 27, iOS 27, *)
        @Test func aModelThatSeesTellsPicturesApart() async throws {
            let root = URL(fileURLWithPath: #filePath).pathComponents.dropLast(6).dropFirst().map { "/\($0)" }.joined()
            let server = LiveServer(model: "eyes=\(root)/tests/golden/vision/smolvlm")
            let model = MLXInferLanguageModel(endpoint: .unix(path: server.path), reconnect: Reconnect(upTo: .seconds(60)))
            var counts: [Int] = []
            for hasPicture in [true, false] {
                let picture = Prompt { Attachment(imageURL: SessionCases.pictureFile()) }
                let session = LanguageModelSession(model: model)
                let answer = try await session.respond(options: GenerationOptions(samplingMode: .greedy, maximumResponseTokens: 8)) {
                    hasPicture ? picture : Prompt("Nothing.")
                    "What is this?"
                }
                counts.append(answer.usage.input.totalTokenCount)
            }
            #expect(counts.count == 2 && counts[0] > counts[1] + 8)
        }

        @available(macOS 27, iOS 27, *)
        @Test func refusalsAreApplesErrors() async throws {
            let session = LanguageModelSession(model: Self.model)
            await #expect {
                try await session.respond(to: String(repeating: "word ", count: 20_000))
            } throws: { error in
                guard case LanguageModelError.contextSizeExceeded(let found) = error else { return false }
                return found.contextSize == 8192 && found.tokenCount > 20_000
            }
            let picture = SessionCases.request(.prompt(.init(segments: [SessionCases.text("See"), SessionCases.picture()])))
            let sent = try SentRequest(picture)
            let refusal = await gather(LiveServer.shared.client.chat(sent.chat)).error
            guard let refusal, case LanguageModelError.unsupportedCapability(let found) = sent.languageModelError(refusal) else {
                Issue.record("\(String(describing: refusal))")
                return
            }
            #expect(found.capability == .vision)
        }

        @available(macOS 27, iOS 27, *)
        @Test func aSchemaThatCannotBeEnforcedIsAnUnsupportedGuide() async throws {
            let json = #"{"type": "object", "title": "Set", "properties": {"all": {"type": "array", "uniqueItems": true}}}"#
            let schema = try JSONDecoder().decode(GenerationSchema.self, from: Data(json.utf8))
            await #expect {
                try await LanguageModelSession(model: Self.model).respond(to: "Go.", schema: schema)
            } throws: { error in
                if case LanguageModelError.unsupportedGenerationGuide(let found) = error { found.schemaName == "Set" } else { false }
            }
        }
    }
#endif
